"""Which nodes take work: drained, about to go, quarantined; and what waits for a node that never comes."""

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Release, Stop
from orchestrator.core.controller.nodes import closed_reason
from orchestrator.core.model import Recovery


def why(c, node):
    return closed_reason(c.control.nodes[node], c.control.drained, c.s)


def test_a_drained_node_takes_no_new_work_and_what_runs_there_goes_on(c, w):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    assert c.tell(m.DrainRequested("a", "new memory")) == ([("node/a", "drained", 0)], [])
    assert why(c, "a") == "node a is drained: new memory; to use it again, run `polyfleet node resume a`"
    assert c.tell(m.DrainRequested("a", "new memory")) == ([], []), "twice is once"
    assert c.tell(m.ResumeRequested("a")) == ([("node/a", "undrained", 0)], [])
    assert why(c, "a") == ""


def test_a_node_that_is_drained_now_has_its_attempts_saved(c, w):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    events, commands = c.tell(m.DrainRequested("a", now=True))
    assert events == [("node/a", "drained", 0), ("j", "preempted", 1)]
    assert commands == [Stop("a", "j", 1, "preempt")]


def test_a_lost_node_is_forgotten_when_its_user_says_that_it_will_not_come_back(c):
    c.node("a")
    c.node("b")
    c.tell(m.DrainRequested("a"))
    c.tell(m.NodesListed((m.ListedNode("ray-b", "b"),)))
    assert c.control.nodes["a"].lost_reason
    assert c.tell(m.RemoveRequested("a")) == ([("node/a", "undrained", 0)], [])
    assert c.control.nodes.keys() == {"b"}
    c.tell(m.NodesListed((m.ListedNode("ray-b", "b"), m.ListedNode("ray-a2", "a"))))
    assert "drained" not in why(c, "a"), "the name has come back and will take work"


def test_a_node_that_lives_or_still_has_attempts_is_not_forgotten(c, w):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    [refused] = c.tell(m.RemoveRequested("a"))[1]
    assert refused.message == "node a is still in the cluster"
    c.tell(m.NodesListed(()))
    [refused] = c.tell(m.RemoveRequested("a"))[1]
    assert refused.message == "node a still has attempts of j"
    [refused] = c.tell(m.RemoveRequested("nope"))[1]
    assert refused.is_missing


def test_a_node_that_is_not_there_is_refused_with_the_nearest_name(c):
    c.node("alpha")
    [refused] = c.tell(m.DrainRequested("alpa"))[1]
    assert (refused.message, refused.is_missing) == ("no node 'alpa'", True)
    assert "alpha" in refused.remedy


def test_a_node_that_ray_drains_takes_nothing_and_its_attempts_save(c, w):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    events, commands = c.tell(m.NodesListed((m.ListedNode("ray-a", "a", draining_s=30.0),)))
    assert (events, commands) == ([("j", "preempted", 1)], [Stop("a", "j", 1, "preempt")])
    assert "is about to shut down" in why(c, "a")
    c.tell(m.NodesListed((m.ListedNode("ray-a", "a"),)))
    assert why(c, "a") == "", "Ray has taken it back"


def test_the_third_failure_within_ten_minutes_puts_a_node_into_quarantine_and_it_says_so(c):
    c.node("a")
    for _ in range(3):
        assert why(c, "a") == ""
        c.tell(m.AgentDied("a", "ray-a"), 60.0)
        c.hear("a")
    assert why(c, "a") == (
        "node a failed 3 times within 10 minutes (last: its agent ended) and takes no jobs for 600 s; "
        "to use it now, run `polyfleet node resume a`"
    )
    c.tell(m.ResumeRequested("a"))
    assert why(c, "a") == ""


def test_failures_that_lie_apart_and_many_words_of_one_failure_put_no_node_into_quarantine(c):
    c.node("a")
    for _ in range(5):
        c.tell(m.AgentDied("a", "ray-a"), 400.0)
        c.tell(m.AgentDied("a", "ray-a"), 0.1)
    c.hear("a")
    assert why(c, "a") == ""


def test_a_job_whose_last_possible_pool_is_absent_waits_and_says_for_what(c, w):
    c.node("a")
    c.submit(w.job("j", w.want("tpu:v5e")))
    assert c.hear_all("a", seconds=10)[0] == []
    assert c.control.plan.why_not["j"] == {(0, "a/cpu"): "is of kind cpu, but the job accepts tpu:v5e"}


def test_a_job_that_is_to_stop_is_refused_with_words_when_nothing_could_ever_run_it(c, w):
    c.node("a")
    c.submit(w.job("j", w.want("tpu:v5e"), recovery=Recovery(on_disconnect="stop")))
    assert c.tick()[0] == [("j", "refused", 0)]
    assert c.events[-1].data["reason"].endswith("; recovery.on_disconnect is stop")
    assert "tpu:v5e" in c.events[-1].data["reason"]


def test_a_job_that_is_to_stop_is_not_refused_while_a_node_has_not_told_what_it_has(c, w):
    """Its raylet was started again, or the server was, and it is still looking for its devices."""
    stops = Recovery(on_disconnect="stop")
    c.node("a")
    c.node("b", 1, "tpu:v5e")
    c.run(w.job("first", w.want("tpu:v5e")))
    c.submit(w.job("j", w.want("tpu:v5e"), recovery=stops))
    c.tell(m.NodesListed((m.ListedNode("ray-a", "a"), m.ListedNode("ray-b2", "b"))))
    assert c.tick(1.0)[0] == []


def test_a_job_that_is_to_stop_is_not_refused_while_a_node_of_the_fleet_is_not_listed_yet(c, w):
    c.node("a")
    c.submit(w.job("j", w.want("tpu:v5e"), recovery=Recovery(on_disconnect="stop")))
    assert c.tick(expected=frozenset({"a", "b"}))[0] == []
    assert c.tick(5.0, expected=frozenset({"a"}))[0] == [("j", "refused", 0)]


def test_a_job_that_is_to_stop_is_not_refused_while_a_lost_node_lives_again_and_is_not_listed_yet(c, w):
    """It was lost before it had told what it has."""
    c.node("a")
    c.tell(m.NodesListed((m.ListedNode("ray-a", "a"), m.ListedNode("ray-b", "b"))))
    c.tell(m.NodesListed((m.ListedNode("ray-a", "a"),)))
    c.submit(w.job("j", w.want("tpu:v5e"), recovery=Recovery(on_disconnect="stop")))
    assert c.tick(expected=frozenset({"a", "b"}))[0] == []


def test_nothing_is_placed_while_there_is_trouble_and_all_is_placed_after_it(c, w):
    c.node("a")
    c.submit(w.job("j", w.want("cpu")))
    assert c.tick(problem="Ray's head does not answer")[0] == []
    assert c.control.problem == "Ray's head does not answer"
    assert c.tick()[0] == [("j", "placed", 1)]


def test_what_is_reserved_for_nobody_is_given_back_until_ray_confirms_it(c, w):
    c.node("a")
    launch = c.run(w.job("j", w.want("cpu")))
    c.tell(m.ReservationsListed(frozenset({"left-over", launch.reservation_name})))
    assert c.tick()[1] == [Release("left-over")]
    c.tell(m.ReleaseAnswered("left-over", "Ray's head does not answer"))
    assert c.hear_all("a", seconds=6)[1] == [Release("left-over")]
    c.tell(m.ReleaseAnswered("left-over"))
    assert c.hear_all("a", seconds=20)[1] == []


def test_the_next_attempt_on_the_same_devices_takes_its_reservation_over(c, w, t):
    c.node("a")
    c.submit(w.job("next", w.want("cpu")))
    first = c.run(w.job("j", w.want("cpu"), priority=1))
    c.hear("a", t.ended("j", 1, 0, "succeeded"))
    events, commands = c.tick()
    assert events == [("next", "placed", 1)]
    assert [type(x).__name__ for x in commands] == ["Launch"], "nothing is given back in between"
    assert commands[0].reservation_name == first.reservation_name


@pytest.mark.parametrize("back_s", [-3.2e8, -3600.0, 3600.0, 3.2e8])
def test_a_wall_clock_that_is_set_changes_no_decision(c, w, t, back_s):
    """Pauses end by the monotonic clock, and events are known by their position."""
    from workers.protocol.messages import RankEvent

    c.node("a")
    c.run(w.job("j", w.want("cpu"), recovery=Recovery(max_restarts=1)))
    c.hear("a", t.report("j", 1, 0, "running", RankEvent("report", 0, 9e8, 100, {"step": 1}), cursor=100))
    c.wall_s += back_s
    later = RankEvent("report", 0, 9e8 + back_s, 200, {"step": 2})
    [stored] = c.hear("a", t.report("j", 1, 0, "running", later, cursor=200))[1]
    assert (stored.at, stored.metrics) == (200, {"step": 2})
    c.hear("a", t.ended("j", 1, 0, "failed", "user", "boom", {0: 1}))
    c.submit(w.job("second", w.want("cpu")))
    assert c.tick(0.5)[0] == [("second", "placed", 1)], "the first pauses for a second"
    c.tell(m.LaunchFailed("second", 1, "launch", "no devices"))
    assert c.tick(0.6)[0] == [("j", "placed", 2)], "its pause has ended"


def test_of_two_waiting_jobs_the_one_that_was_submitted_first_goes_first_whatever_clock_and_name_say(c, w):
    c.node("a")
    c.tell(m.DrainRequested("a"))
    c.submit(w.job("zebra", w.want("cpu"), submitted_s=9e8))
    c.submit(w.job("ant", w.want("cpu"), submitted_s=1e8))
    numbers = {name: record.job.number for name, record in c.control.records.items()}
    assert numbers == {"zebra": 1, "ant": 2}
    c.tell(m.ResumeRequested("a"))
    assert c.tick()[0] == [("zebra", "placed", 1)]


def test_an_agent_that_answers_with_errors_is_named_and_takes_no_work_until_it_tells_what_runs(c, w):
    c.node("a")
    c.tell(m.AgentFailed("a", "ray-a", "its agent fails: TypeError('gather_s')"))
    c.submit(w.job("j", w.want("cpu")))
    assert c.tick()[0] == []
    why = c.control.plan.why_not["j"].values()
    assert list(why) == ["node a: its agent fails: TypeError('gather_s')"]
    c.hear("a", there=(), after_s=0.5)
    assert ("j", "placed", 1) in c.tick()[0]
