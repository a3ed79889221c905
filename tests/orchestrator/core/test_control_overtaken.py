"""Jobs of which attempts have run that the log does not know, an older copy: none is placed while one may still run."""

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Fence, Launch
from orchestrator.core.controller.messages import Now
from orchestrator.core.model import Recovery
from orchestrator.core.step.control import control_from_log
from orchestrator.core.timing import PATIENT_LEASE_S

STANDS_AT_4 = m.LaunchFailed("j", 1, "launch", "attempt 4 of it may have run before", newest_epoch=4)


def overtaken(c, w, **recovery):
    """Job j waits; the fence of its first launch stood at epoch 4."""
    c.node("a")
    c.place(w.job("j", w.want("cpu"), recovery=Recovery(lease_s=10.0, **recovery)))
    assert c.tell(STANDS_AT_4)[0] == [("j", "overtaken", 1), ("j", "interrupted", 1)]


def why(c):
    return c.control.plan.why_not["j"][0, ""]


def launches(commands):
    return [(x.epoch, x.fence_is_ours) for x in commands if isinstance(x, Launch)]


def test_a_fence_is_raised_and_the_job_placed_one_lease_after_it_stood(c, w):
    overtaken(c, w)
    assert c.tick()[1][:1] == [Fence("j", 4)], "it is read first: another controller may have raised it since"
    assert c.hear_all("a", seconds=20)[0] == [], "the fence cannot be written"
    assert why(c).endswith("; its lease is being revoked")
    assert c.tell(m.FenceAnswered("j", 4, current_epoch=4))[1] == [Fence("j", 5)]
    assert c.hear_all("a", seconds=20)[0] == []
    c.tell(m.FenceAnswered("j", 5, current_epoch=5))
    assert c.hear_all("a", seconds=10)[0] == []
    assert why(c) == (
        "attempt 4 or an earlier one, which is not in this server's database, may still be running; "
        "the job can start in 3 s, when its lease has expired"
    )
    assert launches(c.hear_all("a", seconds=6)[1]) == [(5, True)], "our own fence is no attempt of that epoch"
    c.tell(m.LaunchFailed("j", 5, "launch", "no devices"))
    assert launches(c.hear_all("a", seconds=6)[1]) == [(6, False)], "it has waited once"


def test_a_job_that_waits_for_nodes_that_are_cut_off_waits_for_the_lease_that_such_a_job_has(c, w):
    """A day: the unknown attempt was given as much."""
    overtaken(c, w, on_disconnect="wait")
    c.tick()
    c.tell(m.FenceAnswered("j", 4, current_epoch=4))
    c.tell(m.FenceAnswered("j", 5, current_epoch=5))
    assert c.hear_all("a", seconds=60)[0] == []
    assert "(one day, because recovery.on_disconnect is wait)" in why(c)
    c.s += PATIENT_LEASE_S - 60.0
    assert launches(c.hear_all("a", seconds=6)[1]) == [(5, True)]


def test_a_fence_that_another_controller_raised_meanwhile_is_waited_for_as_well(c, w):
    overtaken(c, w)
    c.tick()
    assert c.tell(m.FenceAnswered("j", 4, current_epoch=7))[0] == [("j", "overtaken", 1)]
    assert c.tick()[1][:1] == [Fence("j", 7)]
    assert c.tell(m.FenceAnswered("j", 7, current_epoch=7))[1] == [Fence("j", 8)]
    c.tell(m.FenceAnswered("j", 8, current_epoch=8))
    assert launches(c.hear_all("a", seconds=16)[1]) == [(8, True)]


@pytest.mark.parametrize("before", ["probed", "raised"])
def test_a_controller_that_is_started_anew_reads_the_fence_and_waits_again(c, w, before):
    overtaken(c, w)
    c.tick()
    c.tell(m.FenceAnswered("j", 4, current_epoch=4))
    stands = 5 if before == "raised" else 4
    nodes = c.control.nodes
    c.control = control_from_log(c.control.records.values(), {}, lambda job, epoch: 0, Now(c.s, c.wall_s))
    assert not c.control.nodes and nodes
    c.tell(m.ClusterJoined())
    assert c.tick()[1][:1] == [Fence("j", 4)]
    c.tell(m.FenceAnswered("j", 4, current_epoch=stands))
    c.tick()
    c.tell(m.FenceAnswered("j", stands, current_epoch=stands))
    c.tell(m.FenceAnswered("j", stands + 1, current_epoch=stands + 1))
    c.node("a")
    assert c.hear_all("a", seconds=10)[0] == []
    assert launches(c.hear_all("a", seconds=6)[1]) == [(stands + 1, True)]


def test_a_cancelled_job_waits_for_nothing(c, w):
    overtaken(c, w)
    c.tick()
    assert c.tell(m.CancelRequested("j"))[0] == [("j", "cancelled", 1)]
    assert not c.control.epoch_guards
    assert c.tell(m.FenceAnswered("j", 4, current_epoch=4)) == ([], [])


def test_an_attempt_placed_before_a_newer_one_was_known_does_not_end_the_wait_for_that(c, w, t):
    """It may run on a node that is silent: the next is placed once its lease has passed."""
    c.node("a")
    c.place(w.job("j", w.want("cpu"), recovery=Recovery(lease_s=10.0)))
    assert c.hear("a", epochs={"j": 5})[0] == [("j", "overtaken", 1)]
    c.tell(m.Launched("j", 1))
    assert c.hear("a", t.report("j", 1, 0, "running"))[0] == [("j", "started", 1)]
    assert c.hear("a", t.ended("j", 1, 0, "preempted"))[0] == [("j", "interrupted", 1)]
    c.hear("a", there=())
    events, commands = c.tick()
    assert events == [] and Fence("j", 5) in commands
    assert "may still be running" in why(c)
