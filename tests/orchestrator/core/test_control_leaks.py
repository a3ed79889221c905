"""Devices that Ray reserves for nobody: the node is started again once nothing runs there, and not for less."""

import pytest

from orchestrator.core import timing
from orchestrator.core.controller import messages as m
from orchestrator.core.controller import nodes
from orchestrator.core.controller.commands import Launch, RestartNode, UnwatchAgent
from orchestrator.core.controller.messages import Now
from orchestrator.core.fleet import leaked_devices
from orchestrator.core.model import Recovery

WHY = "Ray does not report the resources [{'CPU': 1.0}] as free"
SAID = "node a was restarted: Ray still had its devices reserved, although nothing used them"


def refuse(c, job, *short, unheld=None, after_s=10.0):
    """A launch of `job` waits in vain for what `short` has."""
    epoch = c.control.records[job].job.epoch
    unheld = short if unheld is None else unheld
    return c.tell(m.LaunchFailed(job, epoch, "launch", WHY, lacking=short, stuck=unheld), after_s)


def refuse_again(c, job, *short, seconds, unheld=None, repairs=True, others=()):
    """And is placed again, for so long, or until a node is to be started again. The commands for that.
    `others`: attempts that their node tells of as well.
    """
    until_s, restarts = c.s + seconds, []
    while c.s < until_s and not restarts:
        if c.control.attempts.get(job):
            refuse(c, job, *short, unheld=unheld)
        for node in c.control.nodes.values():
            c.hear(node.name, *others, there=[f"{o.job}.{o.epoch}.0" for o in others] if others else None)
        told = c.tick(1.0, restarts_nodes=repairs, expected=frozenset(c.control.nodes))
        restarts = [x for x in told[1] if isinstance(x, RestartNode)]
    return restarts


@pytest.fixture
def waiting(c, w):
    c.node("a")
    c.place(w.job("j", w.want("cpu"), recovery=Recovery(backoff_s=1.0)))
    return c


def test_a_node_whose_devices_nobody_holds_is_started_again_once_that_is_certain(waiting):
    assert refuse_again(waiting, "j", "a", seconds=25) == []
    assert refuse_again(waiting, "j", "a", seconds=30) == [RestartNode("a", "ray-a", SAID)]
    why = nodes.closed_reason(waiting.control.nodes["a"], {}, waiting.s)
    assert why == "node a is being restarted: Ray keeps its devices reserved although nothing uses them"


def test_a_node_that_was_started_again_has_not_failed_and_takes_the_job(waiting, t):
    refuse_again(waiting, "j", "a", seconds=55)
    waiting.tell(m.AgentDied("a", "ray-a"))
    assert waiting.tell(m.NodesListed(()))[1] == [UnwatchAgent("a", "ray-a")]
    waiting.tell(m.NodesListed((m.ListedNode("ray-a2", "a"),)), 3.0)
    waiting.tell(m.AgentStarted("a", "ray-a2"))
    waiting.hear("a", ray_id="ray-a2", facts=t.facts("a"))
    node = waiting.control.nodes["a"]
    assert (node.failures, node.stuck) == ((), None)
    assert "Launch" in {type(command).__name__ for command in waiting.tick(60.0)[1]}


def test_one_that_is_not_started_again_is_to_be_once_more(waiting):
    assert refuse_again(waiting, "j", "a", seconds=60)
    since_s = waiting.s
    assert refuse_again(waiting, "j", "a", seconds=60) and waiting.s - since_s >= nodes.NODE_RESTART_S


@pytest.mark.parametrize("unheld", [(), ("b",)])
def test_what_somebody_holds_and_what_is_elsewhere_restarts_no_node(waiting, unheld):
    assert refuse_again(waiting, "j", "a", seconds=300, unheld=unheld) == []


def test_nothing_is_started_again_where_others_run_the_cluster(waiting):
    assert refuse_again(waiting, "j", "a", seconds=120, repairs=False) == []
    [leak] = [found for found in leaked_devices.list_leaks(waiting.control, Now(waiting.s)) if found.node]
    assert (leak.holder, leak.node) == ("Ray", "a") and "although nothing uses them" in leak.reason


def test_what_waits_in_vain_once_in_a_while_is_no_leak(waiting):
    for _ in range(3):
        refuse(waiting, "j", "a")
        waiting.hear_all("a", seconds=timing.STUCK_EXPIRES_S + 10)
        assert waiting.control.attempts["j"]
    assert not any(found.node for found in leaked_devices.list_leaks(waiting.control, Now(waiting.s)))
    assert refuse_again(waiting, "j", "a", seconds=25) == []


@pytest.fixture
def busy(c, w):
    """A node of which Ray has lost count for certain, and on which a job runs."""
    c.node("a", count=2)
    c.run(w.job("runs", w.want("cpu")))
    c.place(w.job("j", w.want("cpu")))
    assert refuse_again(c, "j", "a", seconds=120) == []
    return c


def test_a_node_is_not_started_again_while_something_runs_there(busy, t):
    busy.hear("a", t.ended("runs", 1))
    assert refuse_again(busy, "j", "a", seconds=90) == [RestartNode("a", "ray-a", SAID)]


def test_a_node_is_not_started_again_while_an_attempt_that_does_not_count_runs_there(busy, t):
    busy.hear("a", t.ended("runs", 1))
    assert refuse_again(busy, "j", "a", seconds=90, others=(t.report("other", 3),)) == []
    busy.hear("a", t.ended("other", 3))
    assert refuse_again(busy, "j", "a", seconds=10) == [RestartNode("a", "ray-a", SAID)]


def test_launches_that_wait_in_vain_one_after_the_other_keep_no_node_from_its_restart(c, w):
    """Each that fails would be followed by another."""
    c.node("a", count=2)
    for job in ("i", "j"):
        c.place(w.job(job, w.want("cpu"), recovery=Recovery(backoff_s=0.1)))
        c.hear("a")
    restarts, now_s = [], c.s
    while not restarts:
        assert c.s < now_s + 120
        for at, job in enumerate(("i", "j")):
            if job in c.control.attempts and int(c.s) % 10 == 5 * at:
                refuse(c, job, "a", after_s=0.0)
        c.hear("a")
        told = c.tick(1.0, restarts_nodes=True, expected=frozenset("a"))
        restarts = [x for x in told[1] if isinstance(x, RestartNode)]


def test_nothing_is_started_again_while_ray_is_away_or_where_the_node_is_not_of_this_fleet(waiting):
    assert refuse_again(waiting, "j", "a", seconds=60, repairs=False) == []
    refuse(waiting, "j", "a", after_s=0.0)
    away = m.Tick(problem="Ray's head does not answer", expected=frozenset("a"), restarts_nodes=True)
    for tick in (away, m.Tick(expected=frozenset("b"), restarts_nodes=True)):
        assert not any(isinstance(x, RestartNode) for x in waiting.tell(tick)[1])
    assert waiting.tick(expected=frozenset("a"), restarts_nodes=True)[1] == [RestartNode("a", "ray-a", SAID)]


def test_a_node_that_is_not_to_be_started_again_after_all_takes_work(waiting):
    assert refuse_again(waiting, "j", "a", seconds=60)
    waiting.tell(m.NodeNotRestarted("a", "another"))
    assert "is being restarted" in nodes.closed_reason(waiting.control.nodes["a"], {}, waiting.s)
    waiting.tell(m.NodeNotRestarted("a", "ray-a"))
    assert nodes.closed_reason(waiting.control.nodes["a"], {}, waiting.s) == ""


def test_a_gang_that_finds_no_room_on_one_node_is_told_which_and_tries_that_last(c, w):
    c.node("a")
    c.node("b")
    c.node("c")
    launch = c.place(w.job("g", w.want("cpu", nodes=2)))
    second = launch.nodes[1]
    refuse(c, "g", second)
    job = c.control.records["g"].job
    assert job.avoid == (second,) and f"node {second} (node rank 1): {WHY}" in c.control.records["g"].reason
    [again] = [x for x in c.hear_all("a", "b", "c", seconds=4)[1] if isinstance(x, Launch)]
    assert second not in again.nodes


def test_a_restart_is_over_after_a_while():
    node = nodes.Node("a", "ray-a", 0.0, stuck=nodes.StuckReservation(0.0, 40.0, 41.0))
    assert node.is_restarting(42.0) and not node.is_restarting(41.0 + nodes.NODE_RESTART_S)
