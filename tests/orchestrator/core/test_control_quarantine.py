"""One fault of a node is told by many and for long, and counts once; three faults in ten minutes are three."""

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.model import Recovery


def counted(c, node):
    return [what for _, what in c.control.nodes[node].failures]


def quarantined(c, node):
    return c.control.nodes[node].quarantined_until_s > c.s


def test_a_death_that_its_agent_ray_and_attempts_of_two_leases_tell_counts_once(c, w):
    c.node("a", 2)
    c.node("b")
    c.tell(m.DrainRequested("b"))
    for job, lease_s in (("short", 10.0), ("long", 60.0)):
        c.run(w.job(job, w.want("cpu"), recovery=Recovery(lease_s=lease_s)))
    c.hear_all("a", "b", seconds=20)
    c.tell(m.AgentDied("a", "ray-a"))
    c.hear_all("b", seconds=8)
    for job in ("short", "long"):
        c.tell(m.FenceAnswered(job, 2, current_epoch=2))
    c.hear_all("b", seconds=12)
    c.tell(m.NodesListed((m.ListedNode("ray-b", "b"),)))
    events = c.hear_all("b", seconds=60)[0]
    assert ("long", "interrupted", 1) in events and c.state("short") == "RECOVERING"
    assert counted(c, "a") == ["its agent ended"]


def test_an_attempt_that_is_given_up_once_its_node_is_back_tells_of_the_fault_before(c, w):
    """The node came back with an empty folder, and the other of its attempts has a long lease."""
    c.node("a", 2)
    for job, lease_s in (("short", 10.0), ("long", 60.0)):
        c.run(w.job(job, w.want("cpu"), recovery=Recovery(lease_s=lease_s, max_interruptions=0)))
    c.hear_all("a", seconds=20)
    c.tell(m.AgentDied("a", "ray-a"))
    c.tick(8.0)
    for job in ("short", "long"):
        c.tell(m.FenceAnswered(job, 2, current_epoch=2))
    c.tick(20.0)
    c.hear("a", there=())
    c.tick(1.0)
    c.tell(m.StopAnswered("a", "long", 1, "fence"))
    c.hear("a", there=(), after_s=1.0)
    c.tick(1.0)
    assert (c.state("short"), c.state("long")) == ("", "")
    assert counted(c, "a") == ["its agent ended"]


def test_an_agent_that_nobody_reaches_has_failed_once_however_often_that_is_told(c):
    c.node("a")
    c.hear_all("a", seconds=20)
    for _ in range(120):
        c.tell(m.AgentDied("a", "ray-a"), 0.5)
    assert counted(c, "a") == ["its agent ended"] and not quarantined(c, "a")


@pytest.mark.parametrize("apart_s", [20.0, 100.0, 250.0])
def test_a_node_that_fails_three_times_and_answers_in_between_is_quarantined(c, apart_s):
    c.node("a")
    c.hear_all("a", seconds=20)
    for _ in range(3):
        assert not quarantined(c, "a")
        c.tell(m.AgentDied("a", "ray-a"))
        c.hear_all("a", seconds=apart_s)
    assert quarantined(c, "a") and len(counted(c, "a")) == 3


def test_an_agent_that_ends_again_and_again_within_seconds_is_quarantined(c):
    c.node("a")
    c.hear_all("a", seconds=20)
    for _ in range(8):
        c.tell(m.AgentDied("a", "ray-a"), 5.0)
        c.hear("a", after_s=1.0)
    assert quarantined(c, "a")


def test_a_node_whose_attempts_are_lost_three_times_is_quarantined(c, w):
    """Nothing else tells of it: it is cut off for a while, and comes back."""
    c.node("a")
    c.run(w.job("j", w.want("cpu"), recovery=Recovery(lease_s=5.0)))
    for epoch in (1, 2, 3):
        assert not quarantined(c, "a")
        c.tick(8.0)
        c.tell(m.FenceAnswered("j", epoch + 1, current_epoch=epoch + 1))
        events = c.tick(20.0)[0]
        assert ("j", "interrupted", epoch) in events
        c.hear("a", there=())
        for _ in range(20):
            if c.state("j") != "STARTING":
                c.hear("a")
                c.tick(2.0)
        if epoch < 3:
            c.tell(m.Launched("j", epoch + 1))
    assert quarantined(c, "a") and len(counted(c, "a")) == 3


def test_of_a_gang_that_could_not_be_started_the_node_that_failed_is_blamed_alone(c, w):
    c.node("a")
    c.node("b")
    c.place(w.job("g", w.want("cpu", nodes=2)))
    c.tell(m.LaunchFailed("g", 1, "launch", "node b gave no answer within 20 s", ("a", "b"), unanswered=("b",)))
    assert (counted(c, "a"), len(counted(c, "b"))) == ([], 1)
