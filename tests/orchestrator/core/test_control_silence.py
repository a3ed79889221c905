"""Nodes that are silent: agents that hang are started again, and no attempt is replaced while it may still run."""

import itertools

import pytest

from orchestrator.core import timing
from orchestrator.core.attempt.suspicion import waiting_reason
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Fence, Launch, RemoveFiles, RestartAgent, Stop
from orchestrator.core.model import Recovery

TURN_S = 2.1
"""Longest time between two turns of these tests, with rounding."""


@pytest.fixture
def two(c, w):
    """Nodes a and b; job j runs on a."""
    c.node("a")
    c.node("b")
    c.tell(m.DrainRequested("b"))
    c.run(w.job("j", w.want("cpu"), recovery=Recovery(lease_s=10.0)))
    c.tell(m.ResumeRequested("b"))
    return c


def fences(commands):
    return list(dict.fromkeys(x for x in commands if isinstance(x, Fence)))


def test_an_agent_that_does_not_answer_is_missed_started_again_and_gets_no_new_work(two, w):
    _, commands = two.hear_all("b", seconds=12)
    assert [x.node for x in commands if isinstance(x, RestartAgent)] == ["a"]
    two.submit(w.job("next", w.want("cpu")))
    two.tick()
    assert [part.node for part in two.control.attempts["next"].parts] == ["b"]


def test_an_agent_that_never_answers_is_restarted_less_and_less_often(two):
    """Its machine may be too busy to start it in time, and each restart makes that worse."""
    restarted_s = [two.s for _ in range(700) if restarts(two.hear_all("b", seconds=2)[1])]
    pauses_s = [later - s for s, later in itertools.pairwise(restarted_s)]
    assert pauses_s == pytest.approx([60, 120, 240, 300, 300, 300], abs=TURN_S)


def test_an_agent_that_hangs_often_is_given_longer_until_it_has_answered_for_a_while(two):
    limits_s = [silence_until_restart(two) for _ in range(7)]
    assert limits_s == pytest.approx([5, 5, 5, 5, 10, 20, 40], abs=TURN_S)
    two.hear_all("a", "b", seconds=timing.AGENT_RESTART_WINDOW_S)
    assert silence_until_restart(two) == pytest.approx(5, abs=TURN_S)


def restarts(commands):
    return [x.node for x in commands if isinstance(x, RestartAgent)]


def silence_until_restart(two):
    """Seconds after which the agent of node a is restarted. Then it answers."""
    two.hear("a")
    two.tick(0.0)
    begun_s = two.s
    while not restarts(two.hear_all("b", seconds=2)[1]):
        pass
    waited_s = two.s - begun_s
    two.hear_all("a", "b", seconds=2)
    return waited_s


def test_a_silent_node_is_fenced_waited_for_one_whole_lease_and_then_replaced(two):
    _, commands = two.hear_all("b", seconds=8)
    assert fences(commands) == [Fence("j", 2)]
    events, commands = two.hear_all("b", seconds=20)
    assert events == [], "the fence does not stand yet: its lease may be renewed"
    two.tell(m.FenceAnswered("j", 2, current_epoch=2))
    events, commands = two.hear_all("b", seconds=12)
    assert events == [], "ten seconds of lease, two for the supervisor to notice"
    events, commands = two.hear_all("b", seconds=4)
    assert events == [("j", "interrupted", 1), ("j", "placed", 2)] or events == [("j", "interrupted", 1)]
    events, commands = two.hear_all("b", seconds=4)
    assert [part.node for part in two.control.attempts["j"].parts] == ["b"]


def test_the_pause_after_a_lost_node_counts_from_the_fence_and_has_passed_with_the_lease(two):
    two.hear_all("b", seconds=8)
    two.tell(m.FenceAnswered("j", 2, current_epoch=2))
    assert two.hear_all("b", seconds=12)[0] == []
    two.hear("b")
    assert two.tick(0.5)[0] == [("j", "interrupted", 1), ("j", "placed", 2)], "in one turn"


def test_a_longer_pause_after_a_lost_node_is_kept_from_the_fence_on(c, w):
    c.node("a")
    c.node("b")
    c.tell(m.DrainRequested("b"))
    c.run(w.job("j", w.want("cpu"), recovery=Recovery(lease_s=10.0, backoff_s=30.0)))
    c.tell(m.ResumeRequested("b"))
    c.hear_all("b", seconds=8)
    fenced_off_s = c.control.attempts["j"].fence.since_s
    c.tell(m.FenceAnswered("j", 2, current_epoch=2))
    c.hear_all("b", seconds=14)
    assert c.state("j") == "RECOVERING"
    assert c.control.paused_until_s["j"] == fenced_off_s + 30.0


def test_a_fence_that_could_not_be_written_is_asked_for_again_and_nothing_is_replaced(two):
    for _ in range(10):
        events, commands = two.hear_all("b", seconds=8)
        assert events == [] and fences(commands) == [Fence("j", 2)]
        two.tell(m.FenceAnswered("j", 2, error="Ray's head does not answer"))


def test_a_node_that_ray_calls_dead_is_no_proof_that_its_work_stopped(two):
    """A frozen raylet: its agent may renew the lease until the fence stands."""
    two.tell(m.NodesListed((m.ListedNode("ray-b", "b"),)))
    _, commands = two.hear_all("b", seconds=8)
    assert fences(commands) == [Fence("j", 2)]
    two.tell(m.FenceAnswered("j", 2, current_epoch=2))
    assert two.hear_all("b", seconds=12)[0] == []
    events = two.hear_all("b", seconds=6)[0]
    assert events[0] == ("j", "interrupted", 1)


def test_a_node_that_is_heard_again_in_time_goes_on_and_its_fence_is_lowered(two, t):
    two.hear_all("b", seconds=8)
    two.tell(m.FenceAnswered("j", 2, current_epoch=2))
    two.hear("a", t.report("j", 1, 0, "running"))
    events, commands = two.hear_all("a", "b", seconds=2)
    assert (events, fences(commands)) == ([], [Fence("j", 1, lower=True)])
    two.tell(m.FenceAnswered("j", 1, current_epoch=1))
    assert two.hear_all("a", "b", seconds=30) == ([], [])


def test_the_word_of_its_node_that_nothing_runs_is_enough_if_it_was_asked_after_the_fence(two):
    """The node's folder is gone."""
    two.hear("a", there=())
    two.tick(1.0)
    assert two.tell(m.FenceAnswered("j", 2, current_epoch=2))[1] == [Stop("a", "j", 1, "fence")]
    two.hear("a", there=(), after_s=0.5)
    assert two.tick()[0] == [], "it has not heard the stop"
    two.tell(m.StopAnswered("a", "j", 1, "fence"))
    two.hear("a", there=(), after_s=0.5)
    assert two.tick()[0][0] == ("j", "interrupted", 1)
    assert two.events[0].data["reason"] == "node a has no record of this attempt"


def test_a_list_that_was_asked_for_before_a_newer_one_says_nothing(two):
    two.hear("a", after_s=1.0)
    two.hear("a", there=(), requested_s=two.s - 1.0)
    assert two.tick(0.5) == ([], [])


def test_a_job_that_waits_for_a_node_that_is_cut_off_is_never_replaced(c, w):
    c.node("a")
    c.node("b")
    launch = c.run(w.job("j", w.want("cpu"), recovery=Recovery(on_disconnect="wait")))
    [other] = {"a", "b"} - {*launch.nodes}
    events, commands = c.hear_all(other, seconds=100)
    assert (events, fences(commands)) == ([], [])


def test_a_job_that_is_to_stop_when_it_is_cut_off_ends_with_that_reason(c, w):
    c.node("a")
    c.run(w.job("j", w.want("cpu"), recovery=Recovery(on_disconnect="stop")))
    c.tick(8.0)
    c.tell(m.FenceAnswered("j", 2, current_epoch=2))
    assert c.tick(13.0)[0] == [("j", "failed", 1)]
    assert c.events[0].data["reason"].endswith("recovery.on_disconnect is stop")


def test_a_controller_that_was_stopped_itself_blames_no_node(two):
    assert two.tell(m.Tick(), 60.0) == ([], [])


def test_while_no_fleet_is_joined_no_silence_counts(two):
    two.tell(m.ClusterLeft())
    assert two.tick(60.0) == ([], [])


def test_where_the_head_was_lost_nodes_have_time_to_find_their_way_back_to_it(two):
    two.tell(m.ClusterLeft())
    two.tick(60.0)
    two.tell(m.ClusterJoined())
    two.tell(m.FenceAnswered("j", 1, current_epoch=1))
    assert not fences(two.hear_all("b", seconds=20)[1]), "nor is its silence of before held against it"
    assert fences(two.hear_all("b", seconds=4)[1]) == [Fence("j", 2)]


def test_a_fence_that_others_raised_ends_the_attempt_and_no_epoch_is_used_again(two):
    """Another controller's log is newer: ours was restored."""
    two.tell(m.ClusterJoined())
    assert two.tell(m.FenceAnswered("j", 1, current_epoch=3)) == ([("j", "overtaken", 1)], [Stop("a", "j", 1, "fence")])
    assert two.control.records["j"].job.next_epoch == 4


def test_an_attempt_that_was_lost_and_is_told_again_is_stopped_and_forgotten(two, t):
    two.hear_all("b", seconds=8)
    two.tell(m.FenceAnswered("j", 2, current_epoch=2))
    _, commands = two.hear_all("b", seconds=18)
    assert any(isinstance(x, Launch) for x in commands)
    assert two.hear("a", t.report("j", 1, 0, "running"), there=["j.1.0"])[1] == [Stop("a", "j", 1, "cancel")]
    two.tick(3.0)
    said = t.ended("j", 1, 0, "cancelled")
    assert two.hear("a", said, there=["j.1.0"]) == ([], [RemoveFiles("a", "j", 1)])


def test_the_answer_to_a_fence_that_was_lowered_since_does_not_count_for_the_next_one(two, t):
    """It would stand, as far as the controller knows, before it has been written."""
    two.hear_all("b", seconds=8)
    first = m.FenceAnswered("j", 2, current_epoch=2, requested_s=two.s)
    two.tell(first)
    two.hear("a", t.report("j", 1, 0, "running"))
    assert fences(two.hear_all("a", "b", seconds=2)[1]) == [Fence("j", 1, lower=True)]
    two.tell(m.FenceAnswered("j", 1, current_epoch=1))
    assert fences(two.hear_all("b", seconds=8)[1]) == [Fence("j", 2)]
    two.tell(first)
    assert two.control.attempts["j"].fenced_s is None
    two.tell(m.FenceAnswered("j", 2, current_epoch=2))
    assert two.control.attempts["j"].fenced_s == two.s


def test_a_part_that_may_have_started_is_not_taken_for_ended_while_its_node_answers_and_has_it(c, w, t):
    """Its leases are renewed by every answer that we hear, whatever the fence says."""
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    c.tell(m.LaunchFailed("j", 1, "launch", "node a gave no answer within 20 s", maybe_started=("a",)))
    c.hear("a", t.report("j", 1, 0, "running"))
    c.tick(1.0)
    c.tell(m.FenceAnswered("j", 2, current_epoch=2))
    assert c.hear_all("a", seconds=40)[0] == []
    assert c.hear("a", t.ended("j", 1, 0, "fenced"))[0] == [("j", "interrupted", 1)]


def test_an_attempt_of_which_its_node_tells_under_a_second_name_is_not_replaced(two, t):
    """Its raylet was started again, twice, and Ray still lists those before: the watch of the second name renews all
    leases there.
    """
    second, third = m.ListedNode("0second", "a"), m.ListedNode("1third", "a")
    others = (m.ListedNode("ray-a", "a"), m.ListedNode("ray-b", "b"))
    two.tell(m.NodesListed((*others, second)))
    two.tell(m.AgentStarted("a-0secon", "0second"))

    def heard(name, ray_id, seconds):
        stored = []
        for _ in range(seconds):
            two.hear(name, t.report("j", 1, 0, "running"), there=["j.1.0"], ray_id=ray_id)
            two.hear("b")
            events, commands = two.tick(1.0)
            stored += events
            for _ in fences(commands):
                two.tell(m.FenceAnswered("j", 2, current_epoch=2))
        return stored

    assert heard("a-0secon", "0second", 30) == []
    two.tell(
        m.NodesListed((others[1], second, third))
    )  # the first has gone: the name is the second's, whose agent ended
    assert two.control.nodes["a"].ray_id == "0second"
    two.tell(m.AgentStarted("a-1third", "1third"))
    assert heard("a-1third", "1third", 30) == []
    two.tell(m.NodesListed((others[1], third)))
    two.tell(m.AgentStarted("a", "1third"))
    two.hear("a", t.report("j", 1, 0, "running"), ray_id="1third")
    two.tick(0.5)
    assert two.state("j") == "RUNNING" and two.control.attempts["j"].fenced_s is None


def test_a_second_name_of_a_node_that_is_gone_keeps_no_job_waiting_for_an_attempt_that_has_ended(two, t):
    """It told that the attempt runs, and was lost before it could tell its end, as the node does by its first name."""
    nodes = (m.ListedNode("ray-a", "a"), m.ListedNode("ray-b", "b"))
    two.tell(m.NodesListed((*nodes, m.ListedNode("0second", "a"))))
    two.tell(m.AgentStarted("a-0secon", "0second"))
    two.hear("a-0secon", t.report("j", 1, 0, "running"), there=["j.1.0"], ray_id="0second")
    two.tell(m.NodesListed(nodes))
    two.hear("a", t.ended("j", 1, 0, "lost", "lost", "its supervisor is gone", {}, "a"))
    stored = []
    for _ in range(10):
        two.hear("a", there=())
        two.hear("b", there=())
        stored += two.tick(2.0)[0]
    assert ("j", "placed", 2) in stored


def test_a_job_whose_node_is_silent_says_what_it_waits_for(two):
    def said():
        return waiting_reason(two.control, "j", m.Now(two.s))

    assert said() == ""
    two.hear_all("b", seconds=8)
    assert said() == "node a has not answered for 8 s; the lease of its attempt is being revoked"
    two.tell(m.FenceAnswered("j", 2, current_epoch=2))
    two.hear_all("b", seconds=2)
    assert said() == "node a has not answered for 10 s; its attempt is replaced in 10 s unless the node answers"


def test_a_job_that_is_to_wait_for_its_node_is_not_replaced_and_says_so(c, w):
    c.node("a")
    c.node("b")
    c.run(w.job("j", w.want("cpu"), recovery=Recovery(lease_s=10.0, on_disconnect="wait")))
    node = c.control.attempts["j"].parts[0].node
    [other] = {"a", "b"} - {node}
    events, commands = c.hear_all(other, seconds=300)
    assert (events, fences(commands)) == ([], [])
    told = waiting_reason(c.control, "j", m.Now(c.s))
    assert told.endswith("; the job waits for it (recovery.on_disconnect is wait)"), told


@pytest.mark.parametrize("end", ["succeeded", "preempted"])
def test_the_fence_of_a_gang_is_lowered_although_one_part_has_ended_well_meanwhile(c, w, t, end):
    """Its checkpoints of the other part count again, and a server after this one adopts it."""
    c.node("a")
    c.node("b")
    c.run(w.job("g", w.want("cpu", nodes=2), recovery=Recovery(lease_s=60.0)))
    if end == "preempted":
        c.tell(m.DrainRequested("a", now=True))
    c.hear("a", t.ended("g", 1, 0, end))
    assert fences(c.hear_all("a", seconds=8)[1]) == [Fence("g", 2)]
    c.tell(m.FenceAnswered("g", 2, current_epoch=2))
    c.hear("b", t.report("g", 1, 1, "running"))
    events, commands = c.hear_all("a", "b", seconds=2)
    assert (events, fences(commands)) == ([], [Fence("g", 1, lower=True)])


def test_the_fence_of_a_gang_stays_where_one_part_failed(c, w, t):
    """It ends, whatever the other part tells."""
    c.node("a")
    c.node("b")
    c.run(w.job("g", w.want("cpu", nodes=2), recovery=Recovery(lease_s=60.0)))
    c.hear("a", t.ended("g", 1, 0, "failed", "user", "boom", {0: 1}))
    c.hear_all("a", seconds=8)
    c.tell(m.FenceAnswered("g", 2, current_epoch=2))
    c.hear("b", t.report("g", 1, 1, "running"))
    assert fences(c.hear_all("a", "b", seconds=2)[1]) == []
