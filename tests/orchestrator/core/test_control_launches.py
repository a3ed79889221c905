"""From a placement to its start: the answer of a launch always counts, and a start that failed costs nothing."""

from dataclasses import replace

import pytest

from orchestrator.core.attempt.suspicion import waiting_reason
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.attempts import AttemptState
from orchestrator.core.controller.commands import Fence, Launch, RemoveFiles, Stop
from orchestrator.core.controller.messages import Now
from orchestrator.core.fleet import leaked_devices
from orchestrator.core.model import Recovery
from orchestrator.core.step.control import control_from_log


def test_the_answer_of_a_launch_counts_while_no_fleet_is_joined(c, w, t):
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    c.tell(m.ClusterLeft())
    c.tell(m.Launched("j", 1, step=7))
    assert c.control.attempts["j"].state is AttemptState.ACTIVE, "it would be STARTING for ever"
    assert c.control.records["j"].resumed_step == 7


def test_what_an_attempt_begins_without_is_kept_until_the_next_one_begins(c, w, t):
    c.node("a")
    c.place(w.job("j", w.want("cpu"), recovery=Recovery(max_interruptions=9)))
    assert c.tell(m.Launched("j", 1, missed_files="what it left on b cannot be reached"))[0] == [("j", "resumed", 1)]
    assert c.control.records["j"].missed_files == "what it left on b cannot be reached"
    c.hear("a", t.ended("j", 1, state="failed", kind="lost", message="lost"))
    c.hear("a")
    c.tick(5.0)
    assert c.tell(m.Launched("j", 2))[0] == [("j", "resumed", 2)]
    assert c.control.records["j"].missed_files == ""


def test_a_step_that_an_earlier_attempt_began_with_is_not_told_of_one_that_starts_anew(c, w, t):
    c.node("a")
    c.place(w.job("j", w.want("cpu"), recovery=Recovery(max_interruptions=9)))
    c.tell(m.Launched("j", 1, step=7, source="cpu:j/step-00000007"))
    assert (c.control.records["j"].resumed_step, c.control.records["j"].source) == (7, "cpu:j/step-00000007")
    c.hear("a", t.ended("j", 1, state="failed", kind="lost", message="lost"))
    c.hear("a")
    c.tick(5.0)
    c.tell(m.Launched("j", 2))
    assert (c.control.records["j"].resumed_step, c.control.records["j"].source) == (None, "")


def test_a_launch_that_failed_while_no_fleet_is_joined_frees_its_devices(c, w):
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    c.tell(m.ClusterLeft())
    assert c.tell(m.LaunchFailed("j", 1, "launch", "no devices"))[0] == [("j", "interrupted", 1)]
    assert c.state("j") == "RECOVERING" and not c.control.attempts


def test_a_launch_that_started_no_rank_spends_nothing_waits_longer_each_time_and_avoids_its_node(c, w):
    c.node("a")
    c.node("b")
    launch = c.place(w.job("j", w.want("cpu")))
    pauses = []
    for epoch in (1, 2, 3):
        c.tell(m.LaunchFailed("j", epoch, "launch", f"node {launch.nodes[0]} gave no answer"))
        job = c.control.records["j"].job
        assert (job.interruptions, job.restarts, job.refusals, job.avoid) == (0, 0, epoch, launch.nodes)
        pauses.append(c.control.paused_until_s["j"] - c.s)
        _, commands = c.hear_all("a", "b", seconds=2 * (1 + pauses[-1]))
        [again] = [x for x in commands if isinstance(x, Launch)]
        assert again.nodes != launch.nodes, "the same node is not tried first"
        launch = again
    assert pauses == [1, 2, 4]


def test_what_its_user_has_to_put_right_ends_the_job(c, w):
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    assert c.tell(m.LaunchFailed("j", 1, "user", "secrets.X is not set"))[0] == [("j", "failed", 1)]


def test_a_launch_that_timed_out_is_replaced_only_when_its_start_cannot_arrive_any_more(c, w):
    """The fence is raised, and the node then says that it has nothing."""
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    told = m.LaunchFailed("j", 1, "launch", "node a gave no answer within 20 s", maybe_started=("a",))
    assert c.tell(told) == ([], [Stop("a", "j", 1, "fence")])
    assert c.tick(1.0) == ([], [Fence("j", 2)])
    assert c.hear("a", there=(), after_s=1.0) == ([], []), "it says so, but a start may still arrive"
    assert c.tell(m.FenceAnswered("j", 2, current_epoch=2))[1] == [Stop("a", "j", 1, "fence")]
    assert c.tell(m.StopAnswered("a", "j", 1, "fence"), 0.5) == ([], [])
    c.hear("a", there=(), after_s=1.0)
    assert c.tick()[0] == [("j", "interrupted", 1)]
    assert c.control.records["j"].job.interruptions == 0, "nothing had run"


def test_a_start_that_arrived_after_all_is_stopped_and_told_by_its_end(c, w, t):
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    c.tell(m.LaunchFailed("j", 1, "launch", "node a gave no answer within 20 s", maybe_started=("a",)))
    c.hear("a", t.report("j", 1, 0, "running"))
    assert c.hear("a", t.ended("j", 1, 0, "fenced"))[1] == [RemoveFiles("a", "j", 1)]
    assert c.state("j") == "RECOVERING"


@pytest.mark.parametrize("told", [m.Launched("j", 1), m.LaunchFailed("j", 1, "launch", "late", ("a",))])
def test_an_answer_that_comes_twice_or_of_an_older_epoch_changes_nothing(c, w, told):
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    before = c.control
    assert c.tell(told) == ([], [])
    assert c.control.attempts == before.attempts
    assert c.tell(replace(told, epoch=9)) == ([], [])


def test_a_controller_that_restarts_during_a_launch_gives_its_node_a_word_before_it_places_again(c, w, t):
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    c.control = control_from_log(c.control.records.values(), {}, lambda job, epoch: 0, Now(c.s, c.wall_s))
    c.tell(m.ClusterJoined())
    c.tell(m.NodesListed((m.ListedNode("ray-a", "a"),)))
    c.tell(m.AgentStarted("a", "ray-a"))
    c.hear("a", facts=t.facts("a"), attempts=None)
    assert c.hear("a", t.report("j", 1, 0, "running"))[0] == [("j", "started", 1)], "it had arrived: it is adopted"


def test_a_launch_that_never_arrived_before_the_controller_restarted_costs_its_job_nothing(c, w, t):
    """Its node says that nothing runs there, and its preferred candidate is tried again."""
    c.node("a")
    c.node("v", kind="tpu:v5e")
    launch = c.place(w.job("j", w.want("cpu"), w.want("tpu:v5e"), ordered=True))
    assert launch.nodes == ("a",)
    c.control = control_from_log(c.control.records.values(), {}, lambda job, epoch: 0, Now(c.s, c.wall_s))
    assert c.tell(m.ClusterJoined())[1] == [Fence("j", 1)]
    c.tell(m.FenceAnswered("j", 1, current_epoch=1))
    c.node("v", kind="tpu:v5e")
    c.tell(m.NodesListed((m.ListedNode("ray-v", "v"), m.ListedNode("ray-a", "a"))))
    c.tell(m.AgentStarted("a", "ray-a"))
    c.hear("a", facts=t.facts("a"), attempts=None)
    c.hear("a", there=(), after_s=1.0)
    assert c.tick() == ([], [Fence("j", 2), Stop("a", "j", 1, "fence")]), "its start may still arrive"
    c.tell(m.FenceAnswered("j", 2, current_epoch=2))
    c.tell(m.StopAnswered("a", "j", 1, "fence"))
    c.hear("a", there=(), after_s=1.0)
    assert c.tick()[0] == [("j", "interrupted", 1)]
    events, commands = c.hear_all("a", "v", seconds=4)
    [again] = [x for x in commands if isinstance(x, Launch)]
    record = c.control.records["j"]
    assert (events, again.nodes, record.attempts[-1].candidate) == ([("j", "placed", 2)], ("a",), 0)
    assert (record.job.interruptions, record.job.restarts, record.job.first_candidate) == (0, 0, 0)


def test_an_epoch_that_a_node_or_the_fence_knows_is_never_used(c, w):
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    told = m.LaunchFailed("j", 1, "launch", "attempt 4 of it may have run before", newest_epoch=4)
    assert c.tell(told)[0] == [("j", "overtaken", 1), ("j", "interrupted", 1)]
    assert c.control.records["j"].job.next_epoch == 5


def test_the_fence_that_we_raised_ourselves_is_no_attempt_of_that_epoch(c, w):
    c.node("a")
    c.node("b")
    launch = c.run(w.job("j", w.want("cpu")))
    [other] = {"a", "b"} - {*launch.nodes}
    c.hear_all(other, seconds=8)
    c.tell(m.FenceAnswered("j", 2, current_epoch=2))
    events, commands = c.hear_all(other, seconds=18)
    [again] = [x for x in commands if isinstance(x, Launch)]
    assert events == [("j", "interrupted", 1), ("j", "placed", 2)]
    assert (again.epoch, again.fence_is_ours) == (2, True)


def test_an_attempt_whose_nodes_all_run_it_goes_on_although_an_answer_was_lost(c, w, t):
    c.node("a")
    c.node("b")
    c.place(w.job("g", w.want("cpu", nodes=2)))
    for rank, node in enumerate(("a", "b")):
        c.hear(node, t.report("g", 1, rank, "running"))
    told = m.LaunchFailed("g", 1, "launch", "node a gave no answer within 20 s", maybe_started=("a", "b"))
    assert c.tell(told) == ([], [])
    assert c.hear_all("a", "b", seconds=10) == ([], [])
    assert c.state("g") == "RUNNING"


def test_a_connection_that_breaks_because_a_launch_in_part_was_cancelled_is_no_failure_of_the_job(c, w, t):
    """Node b has not told of its part yet; it does, and both are stopped, one after the other."""
    c.node("a")
    c.node("b")
    c.place(w.job("g", w.want("cpu", nodes=2)))
    c.hear("a", t.report("g", 1, 0, "running"))
    told = m.LaunchFailed("g", 1, "launch", "node b gave no answer within 20 s", maybe_started=("a", "b"))
    assert c.tell(told)[1] == [Stop("a", "g", 1, "fence"), Stop("b", "g", 1, "fence")]
    c.hear("b", t.report("g", 1, 1, "running"))
    c.hear("a", t.ended("g", 1, 0, "fenced"))
    broken = t.ended("g", 1, 1, "failed", "user", "connection closed by peer", {1: 1}, "b")
    assert c.hear("b", broken)[0] == [("g", "interrupted", 1)]
    assert "node b gave no answer within 20 s" in c.control.records["g"].reason


def test_a_fence_is_raised_only_once_it_is_known_where_it_stood(c, w, t):
    """The log is an older one: the fence may stand at the next epoch for an attempt that is not in it."""
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.control = control_from_log(c.control.records.values(), {}, lambda job, epoch: 0, Now(c.s, c.wall_s))
    assert c.tell(m.ClusterJoined())[1] == [Fence("j", 1)]
    c.tell(m.FenceAnswered("j", 1, error="the fence cannot be written"))
    assert {x for x in c.tick(12.0)[1] if isinstance(x, Fence)} == {Fence("j", 1)}, "asked again, and not raised"
    assert c.tell(m.FenceAnswered("j", 1, current_epoch=2))[0] == [("j", "overtaken", 1)]
    assert c.control.records["j"].job.next_epoch == 3


def test_a_fence_of_others_that_is_read_lower_later_still_ended_the_attempt(c, w):
    """The server before us had taken it down, and that came late: nothing counts again once it was overruled."""
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.control = control_from_log(c.control.records.values(), {}, lambda job, epoch: 0, Now(c.s, c.wall_s))
    c.tell(m.ClusterJoined())
    c.hear("a", there=["j.1.0"])
    assert c.tell(m.FenceAnswered("j", 1, current_epoch=2))[0] == [("j", "overtaken", 1)]
    asked_s = c.control.attempts["j"].fence
    assert c.tell(m.FenceAnswered("j", 1, current_epoch=1)) == ([], [])
    live = c.control.attempts["j"]
    assert live.fence == asked_s is not None and live.superseded_reason and live.state is AttemptState.SUPERSEDED


def test_a_launch_that_takes_long_says_what_it_does(c, w):
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    c.hear_all("a", seconds=8)
    assert waiting_reason(c.control, "j", Now(c.s), "copies step 40 from gpu") == ""
    c.hear_all("a", seconds=4)
    doing = "copies step 40 from gpu"
    assert (
        waiting_reason(c.control, "j", Now(c.s), doing)
        == "the attempt has been starting for 12 s: it copies step 40 from gpu"
    )
    assert (
        waiting_reason(c.control, "j", Now(c.s))
        == "the attempt has been starting for 12 s: it waits for other launches to end"
    )
    c.tell(m.Launched("j", 1))
    assert waiting_reason(c.control, "j", Now(c.s), doing) == ""


def test_a_launch_that_hangs_after_its_job_was_cancelled_is_told_as_a_leak(c, w):
    c.node("a")
    c.place(w.job("j", w.want("cpu"), recovery=Recovery(lease_s=10.0)))
    c.hear_all("a", seconds=60)
    c.tell(m.CancelRequested("j"))
    assert leaked_devices.list_leaks(c.control, Now(c.s)) == []
    c.hear_all("a", seconds=30)
    [leak] = leaked_devices.list_leaks(c.control, Now(c.s))
    assert leak.holder == "j.1"
    assert leak.reason == (
        "the job is CANCELLED, and its attempt still holds a/cpu [0], cancelled 30 s ago; its launch has not ended"
    )
