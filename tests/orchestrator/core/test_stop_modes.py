"""The table of stop modes: each of its rows decides in one scenario, and is missed there once it is gone."""

import pytest

from orchestrator.core.attempt import stop_modes
from orchestrator.core.attempt.stop_modes import STOP_MODES
from orchestrator.core.controller import messages as m
from orchestrator.core.controller.commands import Stop


def cancel(gang, t):
    return gang.tell(m.CancelRequested("g"))


def fail_on_a(gang, t):
    return gang.hear("a", t.ended("g", 1, 0, "failed", "user", "ValueError", codes={0: 1}))


def raise_fence_elsewhere(gang, t):
    return gang.tell(m.FenceAnswered("g", 1, current_epoch=5))


def lose_on_a(gang, t):
    """Node a lists no attempt."""
    gang.hear("a", there=(), after_s=1.0)
    return gang.tick()


def fail_on_b_while_a_is_silent(gang, t):
    """The broken connection to a may have caused it."""
    gang.hear_all("b", seconds=8)
    return gang.hear("b", t.ended("g", 1, 1, "failed", "crash", "connection reset", codes={1: 1}, node="b"))


def drain(gang, t):
    return gang.tell(m.DrainRequested("a", now=True))


def save_on_a(gang, t):
    """Its rank there was stopped by somebody else: the job is not SAVING."""
    return gang.hear("a", t.ended("g", 1, 0, "preempted", codes={0: 0}))


SCENARIOS = {
    "_is_cancelled": (cancel, {"a": "cancel", "b": "cancel"}),
    "_failed_before_cut_off": (fail_on_a, {"b": "cancel"}),
    "_is_superseded": (raise_fence_elsewhere, {"a": "fence", "b": "fence"}),
    "_has_unconfirmed": (lose_on_a, {"a": "fence", "b": "fence"}),
    "_has_broken": (fail_on_b_while_a_is_silent, {"a": "fence"}),
    "_is_saving": (drain, {"a": "preempt", "b": "preempt"}),
    "_has_preempted": (save_on_a, {"b": "preempt"}),
}


def stops(done):
    return {command.node: command.how for command in done[1] if isinstance(command, Stop)}


def test_every_row_has_a_scenario():
    assert [applies.__name__ for applies, _ in STOP_MODES] == list(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_row_decides_how_an_attempt_stops(gang, t, name):
    happen, modes = SCENARIOS[name]
    assert stops(happen(gang, t)) == modes


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_row_that_is_removed_is_missed(gang, t, monkeypatch, name):
    rows = tuple(row for row in STOP_MODES if row[0].__name__ != name)
    monkeypatch.setattr(stop_modes, "STOP_MODES", rows)
    happen, modes = SCENARIOS[name]
    assert stops(happen(gang, t)) != modes
