"""Fences of attempts: whose one is, what stands in a cluster that is joined anew, and that each is taken down again."""

import pytest

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.attempts import AttemptState
from orchestrator.core.controller.commands import Fence
from orchestrator.core.model import Recovery


@pytest.fixture
def two(c, w):
    """Nodes a and b; job j runs on a."""
    return on_a(c, w)


def on_a(c, w, **recovery):
    c.node("a")
    c.node("b")
    c.tell(m.DrainRequested("b"))
    c.run(w.job("j", w.want("cpu"), recovery=Recovery(lease_s=10.0, **recovery)))
    c.tell(m.ResumeRequested("b"))
    return c


def fences(commands):
    return list(dict.fromkeys(x for x in commands if isinstance(x, Fence)))


def fence_off(c, job="j"):
    """Node a is silent, and the fence of its attempt stands."""
    assert fences(c.hear_all("b", seconds=8)[1]) == [Fence(job, 2)]
    c.tell(m.FenceAnswered(job, 2, current_epoch=2))


def rejoin(c):
    c.tell(m.ClusterLeft())
    return fences(c.tell(m.ClusterJoined())[1])


def test_a_fence_of_ours_is_raised_anew_in_a_cluster_that_is_joined_anew(two, t):
    """To read it would tell that it stands, and not that it is ours."""
    fence_off(two)
    assert rejoin(two) == [Fence("j", 2)]
    assert two.tell(m.FenceAnswered("j", 2, current_epoch=2))[0] == []
    two.hear("a", t.report("j", 1, 0, "running"))
    events, commands = two.hear_all("a", "b", seconds=2)
    assert (events, fences(commands)) == ([], [Fence("j", 1, lower=True)])
    two.tell(m.FenceAnswered("j", 1, current_epoch=1))
    assert two.state("j") == "RUNNING" and not two.control.epoch_guards


def test_our_own_fence_that_is_read_is_no_sign_of_a_newer_attempt_and_is_taken_down(two):
    """It was to be lowered, and was not."""
    fence_off(two)
    two.hear("a")
    assert fences(two.tick()[1]) == [Fence("j", 1, lower=True)]
    two.tell(m.FenceAnswered("j", 1, current_epoch=1))
    assert rejoin(two) == [Fence("j", 1)]
    assert two.tell(m.FenceAnswered("j", 1, current_epoch=2)) == ([], [Fence("j", 1, lower=True)])


def test_the_fence_of_an_attempt_that_counts_is_read_in_a_cluster_that_is_joined_anew(two):
    asked_s = two.s
    assert rejoin(two) == [Fence("j", 1)]
    two.tell(m.FenceAnswered("j", 1, current_epoch=1, requested_s=asked_s - 1.0))
    assert two.control.attempts["j"].state is AttemptState.ADOPTED, "that was read before"
    two.tell(m.FenceAnswered("j", 1, current_epoch=1))
    assert two.control.attempts["j"].state is AttemptState.ACTIVE


def test_the_fence_of_an_attempt_whose_silent_node_answers_again_is_still_read_in_time(two):
    """`check` of every step holds how long a state without a reply lasts."""
    rejoin(two)
    two.hear_all("b", seconds=30)
    assert two.control.attempts["j"].state is AttemptState.CHECKING
    two.hear("a")
    assert two.control.attempts["j"].state is AttemptState.CHECKING
    two.tick()
    assert two.control.attempts["j"].state is AttemptState.ADOPTED
    assert fences(two.hear_all("a", "b", seconds=4)[1]) == [Fence("j", 1)]


def test_a_read_that_became_overdue_while_the_server_was_stopped_is_repeated_at_once(two):
    rejoin(two)
    two.hear_all("b", seconds=30)
    two.hear("a")
    assert fences(two.tell(m.Tick(), 3.9)[1]) == [Fence("j", 1)]
    assert two.control.attempts["j"].state is AttemptState.ADOPTED


def test_a_launch_under_way_reads_its_fence_itself(c, w):
    """Raised for it meanwhile, it would stand at its epoch as if another attempt had taken that."""
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    assert rejoin(c) == []


def test_a_fence_above_an_attempt_that_is_being_launched_counts_once_the_launch_has_read_it(c, w):
    """A late answer to the request of the job's guard comes first."""
    c.node("a")
    c.place(w.job("j", w.want("cpu")))
    assert c.tell(m.FenceAnswered("j", 1, current_epoch=5)) == ([], [])
    events, _ = c.tell(m.LaunchFailed("j", 1, "launch", "attempt 5 of it may have run before", newest_epoch=5))
    assert events == [("j", "overtaken", 1), ("j", "interrupted", 1)]
    assert c.control.records["j"].job.next_epoch == 6
    assert fences(c.tick()[1]) == [Fence("j", 5)], "it waits for the lease of attempt 5"


def test_our_own_fence_of_a_job_without_an_attempt_is_raised_anew_and_no_epoch_is_left_out(c, w, t):
    """A node has told of an attempt that the log does not know."""
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.hear("a", epochs={"j": 3})
    c.hear("a", t.ended("j", 1, 0, "failed", "lost", "lost"))
    c.hear("a", there=())
    assert fences(c.tick()[1]) == [Fence("j", 3)]
    assert fences(c.tell(m.FenceAnswered("j", 3, current_epoch=3))[1]) == [Fence("j", 4)]
    c.tell(m.FenceAnswered("j", 4, current_epoch=4))
    rejoin(c)
    assert fences(c.tick()[1]) == [Fence("j", 3)]
    assert c.tell(m.FenceAnswered("j", 3, current_epoch=4)) == ([], [Fence("j", 4)])
    assert c.control.records["j"].job.next_epoch == 4


def test_a_superseded_attempt_ends_with_its_lease_also_where_its_job_waits_for_its_node(c, w):
    on_a(c, w, on_disconnect="wait")
    rejoin(c)
    c.tell(m.FenceAnswered("j", 1, current_epoch=3))
    c.tell(m.NodesListed((m.ListedNode("ray-b", "b"),)))
    assert rejoin(c) == [Fence("j", 2)], "raised anew, as another cluster may have lost it"
    c.tell(m.FenceAnswered("j", 2, current_epoch=3))
    assert c.control.attempts["j"].fenced_s == c.s


def test_the_pause_of_a_superseded_attempt_counts_from_when_that_was_known(c, w, t):
    on_a(c, w, backoff_s=30.0)
    rejoin(c)
    c.tell(m.FenceAnswered("j", 1, current_epoch=3))
    known_s = c.s
    c.hear("a", t.ended("j", 1, 0, "fenced"), after_s=2.0)
    assert c.control.paused_until_s["j"] == known_s + 30.0


def test_an_answer_that_comes_twice_does_not_begin_the_wait_for_the_lease_anew(two):
    fence_off(two)
    stood_s = two.s
    two.tell(m.FenceAnswered("j", 2, current_epoch=2), 5.0)
    assert two.control.attempts["j"].fenced_s == stood_s


def test_a_gang_that_cannot_end_well_does_not_wait_for_a_node_that_is_gone(c, w, t):
    """It would hold the devices of the others without end."""
    c.node("a")
    c.node("b")
    c.run(w.job("g", w.want("cpu", nodes=2), recovery=Recovery(on_disconnect="wait")))
    c.tell(m.NodesListed((m.ListedNode("ray-a", "a"),)))
    c.hear("a", t.ended("g", 1, 0, "failed", "user", "boom", {0: 1}))
    assert fences(c.hear_all("a", seconds=8)[1]) == [Fence("g", 2)]


@pytest.fixture
def lowering(two, t):
    """The fence of j stands, and is to be taken down since its node answers again."""
    fence_off(two)
    two.hear("a", t.report("j", 1, 0, "running"))
    assert fences(two.tick()[1]) == [Fence("j", 1, lower=True)]
    return two


def test_a_fence_is_asked_to_be_lowered_until_that_is_confirmed(lowering):
    """While it stands, its ranks save nothing, and the next silence of the server ends them."""
    lowering.tell(m.FenceAnswered("j", 1, error="Ray's head does not answer"))
    for _ in range(3):
        assert fences(lowering.hear_all("a", "b", seconds=4)[1]) == [Fence("j", 1, lower=True)]
    lowering.tell(m.FenceAnswered("j", 1, current_epoch=1))
    assert fences(lowering.hear_all("a", "b", seconds=60)[1]) == []


def test_an_answer_from_before_a_fence_was_to_be_lowered_does_not_confirm_that(lowering):
    lowering.tell(m.FenceAnswered("j", 1, current_epoch=1, requested_s=lowering.s - 5.0))
    assert fences(lowering.hear_all("a", "b", seconds=4)[1]) == [Fence("j", 1, lower=True)]


def test_the_late_answer_of_a_first_try_confirms_that_a_fence_was_lowered(lowering):
    first_s = lowering.control.attempts["j"].fence.sent_s
    lowering.hear_all("a", "b", seconds=4)
    lowering.tell(m.FenceAnswered("j", 1, current_epoch=1, requested_s=first_s))
    assert fences(lowering.hear_all("a", "b", seconds=60)[1]) == []


def test_a_fence_that_was_lowered_in_the_cluster_before_is_not_confirmed_in_the_next(lowering):
    asked_s = lowering.s
    lowering.hear_all("a", "b", seconds=2)
    assert rejoin(lowering) == [Fence("j", 1, lower=True)]
    lowering.tell(m.FenceAnswered("j", 1, current_epoch=1, requested_s=asked_s))
    assert lowering.control.attempts["j"].state is AttemptState.LOWERING
    lowering.tell(m.FenceAnswered("j", 1, current_epoch=1))
    assert lowering.control.attempts["j"].state is AttemptState.ACTIVE


def test_a_node_that_is_silent_anew_is_fenced_off_although_the_lowering_was_not_confirmed(lowering):
    commands = lowering.hear_all("b", seconds=8)[1]
    assert fences(commands)[-1] == Fence("j", 2)
    lowering.tell(m.FenceAnswered("j", 2, current_epoch=2))
    assert lowering.control.attempts["j"].fenced_s == lowering.s
    assert fences(lowering.hear_all("b", seconds=4)[1]) == []


def test_a_fence_is_lowered_also_while_its_job_waits_for_a_node_that_is_silent_anew(c, w, t):
    """Cut off, that node would read the fence and end the attempt that its user wants to go on."""
    on_a(c, w, on_disconnect="wait")
    c.hear("a", there=())
    assert fences(c.tick()[1]) == [Fence("j", 2)]
    c.tell(m.FenceAnswered("j", 2, current_epoch=2))
    c.hear("a", t.report("j", 1, 0, "running"), after_s=1.0)
    assert fences(c.tick()[1]) == [Fence("j", 1, lower=True)]
    commands = c.hear_all("b", seconds=20)[1]
    assert fences(commands) == [Fence("j", 1, lower=True)] and len(commands) > 3


def test_a_fence_that_is_being_lowered_is_lowered_in_a_cluster_that_is_joined_anew(lowering):
    assert rejoin(lowering) == [Fence("j", 1, lower=True)]


def test_the_fence_of_an_adopted_attempt_is_asked_for_until_it_is_known(two):
    """A newer attempt, or a server before us, may have raised it."""
    assert rejoin(two) == [Fence("j", 1)]
    two.tell(m.FenceAnswered("j", 1, error="Ray's head does not answer"))
    assert fences(two.hear_all("a", "b", seconds=6)[1]) == [Fence("j", 1)]
    two.tell(m.FenceAnswered("j", 1, current_epoch=1))
    assert fences(two.hear_all("a", "b", seconds=60)[1]) == []
