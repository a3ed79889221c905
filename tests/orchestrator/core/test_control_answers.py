"""An answer counts for the command that it answers, and for none that was given later."""

from orchestrator.core.controller import messages as m
from orchestrator.core.controller.attempts import StopState
from orchestrator.core.controller.commands import Release, Stop


def releases(commands):
    return [x for x in commands if isinstance(x, Release)]


def test_the_late_answer_of_a_release_does_not_count_for_what_was_reserved_anew(c, w, t):
    """Ray would keep it for nobody until its reservations are listed."""
    c.node("a")
    place = c.run(w.job("first", w.want("cpu"))).reservation_name
    c.hear("a", t.ended("first", 1))
    assert releases(c.tick()[1]) == [Release(place)]
    first_s = c.control.pending_releases[place].requested_s
    c.hear("a", there=())
    assert c.place(w.job("second", w.want("cpu"))).reservation_name == place
    c.tell(m.LaunchFailed("second", 1, "launch", "node a gave no answer"), 0.5)
    c.tell(m.ReleaseAnswered(place, requested_s=first_s))
    assert place in c.control.pending_releases
    assert releases(c.tick()[1]) == [Release(place)]
    c.tell(m.ReleaseAnswered(place))
    assert place not in c.control.pending_releases


def test_the_late_answer_of_a_stop_from_before_the_fence_stood_does_not_count_for_the_next(c, w):
    """A start that was on its way then may have arrived since: only what its node says after a new stop is proof."""
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.hear("a", there=())
    assert Stop("a", "j", 1, "fence") in c.tick()[1]
    first_s = c.control.attempts["j"].stop_requests["a"].since_s
    assert c.tell(m.FenceAnswered("j", 2, current_epoch=2), 0.5)[1] == [Stop("a", "j", 1, "fence")]
    c.tell(m.StopAnswered("a", "j", 1, "fence", requested_s=first_s))
    c.hear("a", there=(), after_s=0.5)
    assert c.tick()[0] == []
    c.tell(m.StopAnswered("a", "j", 1, "fence"))
    c.hear("a", there=(), after_s=0.5)
    assert c.tick()[0][0] == ("j", "interrupted", 1)


def test_the_error_of_a_try_does_not_undo_the_answer_of_another(c, w):
    """It would be asked again at once, although it has heard."""
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    c.tell(m.CancelRequested("j"))
    c.tell(m.StopAnswered("a", "j", 1, "cancel"))
    c.tell(m.StopAnswered("a", "j", 1, "cancel", "node a gave no answer within 3 s"))
    assert c.control.attempts["j"].stop_requests["a"].state is StopState.ACKNOWLEDGED
