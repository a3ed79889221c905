"""Nodes that get no agent: how often it is tried, and what is said; and what Ray gives out there."""

from itertools import pairwise

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import LogWarning, StartAgent
from orchestrator.core.controller.nodes import closed_reason
from orchestrator.core.fleet.membership import MAX_RETRY_S, agent_retry_s

WHY = "its agent cannot start: No module named 'psutil'"


def tries(c, seconds):
    """Seconds at which the agent of node a is made, each of which ends without a word."""
    made, begun_s = [], c.s
    for _ in range(seconds):
        if StartAgent("a", "ray-a") in c.tick(1.0)[1]:
            made.append(round(c.s - begun_s))
            c.tell(m.AgentStarted("a", "ray-a"))
            c.tell(m.AgentDied("a", "ray-a", is_permanent=True, why=WHY))
    return made


def joined(c):
    assert c.tell(m.NodesListed((m.ListedNode("ray-a", "a"),)))[1] == [StartAgent("a", "ray-a")]
    c.tell(m.AgentStarted("a", "ray-a"))


def test_an_agent_that_never_begins_is_made_less_and_less_often_and_its_node_says_why(c):
    joined(c)
    assert c.tell(m.AgentDied("a", "ray-a", is_permanent=True, why=WHY))[1] == [
        LogWarning(f"node a: {WHY}; the server retries")
    ]
    assert closed_reason(c.control.nodes["a"], {}, c.s) == "node a has not reported its running attempts yet"
    made = tries(c, 2000)
    pauses = [later - earlier for earlier, later in pairwise(made)]
    assert made[:2] == [2, 4] and pauses == sorted(pauses) and 300 <= pauses[-1] <= 302 and len(made) < 20
    assert closed_reason(c.control.nodes["a"], {}, c.s) == f"node a: {WHY}"


def test_an_agent_that_could_not_be_made_is_told_alike(c):
    joined(c)
    for _ in range(3):
        c.tell(m.AgentStarted("a", "ray-a", "Ray does not answer"), 5.0)
    assert closed_reason(c.control.nodes["a"], {}, c.s) == "node a: its agent could not be started: Ray does not answer"


def test_an_agent_that_speaks_at_last_makes_the_node_usable_and_the_next_end_is_no_failed_start(c):
    joined(c)
    tries(c, 30)
    c.tick(10.0)
    c.tell(m.AgentStarted("a", "ray-a"))
    c.hear("a", there=())
    node = c.control.nodes["a"]
    assert (node.agent_error, node.failed_agent_starts) == ("", 0)
    assert StartAgent("a", "ray-a") in c.tell(m.AgentDied("a", "ray-a", is_permanent=True))[1], "at once"


def test_between_tries_goes_a_second_and_then_twice_as_long_each_time_up_to_five_minutes():
    assert [agent_retry_s(n) for n in (0, 1, 3, 4, 5, 8)] == [1.0, 1.0, 1.0, 2.0, 4.0, 32.0]
    assert agent_retry_s(12) == agent_retry_s(10_000) == MAX_RETRY_S


def test_a_cpu_device_costs_what_ray_gives_out_there_and_not_what_the_machine_has(c, w, t):
    """A node that was started with `--num-cpus=1` on a machine with 8: what is asked above that never comes free."""
    c.tell(m.NodesListed((m.ListedNode("ray-a", "a", cpus=1.0),)))
    c.tell(m.AgentStarted("a", "ray-a"))
    c.hear("a", facts=t.facts("a", 2))
    c.hear("a")
    assert c.run(w.job("j", w.want("cpu", count=2))).bundles == ({"CPU": 1.0},)
    c.node("b")
    assert c.run(w.job("k", w.want("cpu", node="b"))).bundles == ({"CPU": 8.0},), "Ray has not told"
