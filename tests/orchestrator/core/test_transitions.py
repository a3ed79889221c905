"""Changes of states by the rows of the tables: an event that is in none changes nothing, and is noticed."""

import pytest

from orchestrator.core.attempt import transitions
from orchestrator.core.attempt.attempt_states import STOP, StopState
from orchestrator.core.attempt.transitions import UNEXPECTED, move_stop
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import LogWarning
from orchestrator.core.controller.draft import Draft
from orchestrator.core.controller.messages import Now


@pytest.fixture
def one(c, w):
    """Job j runs on node a."""
    c.node("a")
    c.run(w.job("j", w.want("cpu")))
    return c


def test_an_event_of_no_table_changes_nothing_and_is_logged(one):
    draft = Draft(one.control, Now(one.s, one.wall_s))
    move_stop(draft, "j", "a", "timed_out")
    text = f"{UNEXPECTED}: timed_out for the request to stop attempt j.1 on a, which is NONE"
    assert (draft.commands, draft.attempts.current) == ([LogWarning(text)], one.control.attempts)


def test_an_event_of_no_table_fails_the_tests_of_the_controller(one, monkeypatch):
    wanted = (StopState.NONE, "wanted")
    monkeypatch.setattr(transitions, "STOP", {row: after for row, after in STOP.items() if row != wanted})
    with pytest.raises(AssertionError, match=UNEXPECTED):
        one.tell(m.DrainRequested("a", now=True))
