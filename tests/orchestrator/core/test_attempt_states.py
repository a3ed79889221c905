"""The tables of an attempt, of its parts and of its stop requests: each row happens, and is missed once it is gone."""

from collections import Counter

import pytest

from orchestrator.core.attempt import transitions
from orchestrator.core.attempt.attempt_states import (
    ATTEMPT,
    ATTEMPT_MEANING,
    FIRST,
    IGNORED_BY_ATTEMPT,
    IGNORED_BY_PART,
    IGNORED_BY_STOP,
    PART,
    PART_MEANING,
    STOP,
    STOP_MEANING,
    TIMERS,
    AttemptState,
    PartState,
    StopState,
    stop_state,
)
from orchestrator.core.attempt.transitions import UNEXPECTED
from orchestrator.core.controller import messages as m
from orchestrator.core.model import Recovery
from tests.simulator.state_changes import MESSAGES, TABLES, attempt_state, explaining_rows, is_explained

A, P, S = AttemptState, PartState, StopState
NO_ANSWER = {"kind": "launch", "message": "node a gave no answer", "unanswered": ("a",)}


def ids(row):
    return "-".join(map(str, row))


class Story:
    """Brings an attempt into a state, and lets an event happen to it. Jobs run on node a, gangs on a and b."""

    def __init__(self, c, w, t):
        self.c, self.w, self.t = c, w, t
        c.node("a")
        c.node("b")

    def place(self, name, nodes):
        recovery = Recovery(lease_s=10.0, grace_s=3.0)
        if nodes == 1:
            self.c.tell(m.DrainRequested("b"))
        self.c.place(self.w.job(name, self.w.want("cpu", nodes=nodes), recovery=recovery))

    def run(self):
        self.place("j", 1)
        self.c.tell(m.Launched("j", 1))
        self.c.hear("a", self.t.report("j", 1, 0, "running"))

    def read(self, epoch, current, ago_s=0.0):
        self.c.tell(m.FenceAnswered("j", epoch, current_epoch=current, requested_s=self.c.s - ago_s))

    def rejoin(self):
        self.c.tell(m.ClusterLeft())
        self.c.tell(m.ClusterJoined(), 1.0)

    def silence(self, seconds):
        """Node a is silent."""
        self.c.hear_all("b", seconds=seconds)

    def answer(self):
        self.c.hear("a")
        self.c.tick()


class AttemptStory(Story):
    def state(self):
        return attempt_state(self.c.control.attempts.get("j"))

    def reach(self, state, event):
        if state is A.LAUNCHING:
            self.place("j", 1)
            return
        self.run()
        steps = {
            A.FENCING: lambda: self.silence(8),
            A.FENCED: lambda: self.read(2, 2),
            A.LOWERING: self.answer,
            A.ACTIVE: lambda: self.read(1, 1),
            A.ADOPTED: self.rejoin,
        }
        after = {A.CHECKING: lambda: self.silence(23), A.SUPERSEDED: lambda: self.read(1, 5)}
        for reached, step in steps.items():
            step()
            if reached is state:
                return
        after[state]()

    def happen(self, event):
        c, failed = self.c, m.LaunchFailed("j", 1, maybe_started=("a",), **NO_ANSWER)
        {
            "launched": lambda: c.tell(m.Launched("j", 1)),
            "launch_failed": lambda: c.tell(failed),
            "rejoined": self.rejoin,
            "fence_clear": lambda: self.read(1, 1, 0.0 if self.state() in (A.ADOPTED, A.CHECKING) else 0.5),
            "fence_lowered": lambda: self.read(1, 1),
            "fence_raised": lambda: self.read(2, 2, 0.0 if self.state() is A.FENCING else 30.0),
            "own_fence_read": lambda: self.read(1, 2),
            "fence_above": lambda: self.read(1, 5),
            "suspected": lambda: self.silence(23),
            "recovered": self.answer,
            "timed_out": lambda: self.silence(4),
            "concluded": lambda: c.hear("a", self.t.ended("j", 1, 0, "succeeded", codes={0: 0})),
        }[event]()


class PartStory(Story):
    def state(self):
        return self.c.control.attempts["g"].parts[0].state

    def reach(self, state, event):
        self.place("g", 2)
        if event not in ("not_started", "start_unanswered"):
            self.c.tell(m.Launched("g", 1))
        if state is not P.UNCONFIRMED:
            self._reach_unhidden(state)
            return
        hidden = event.removeprefix("listed_").upper()
        self._reach_unhidden(P(hidden) if hidden in P.__members__ else P.UNREPORTED)
        self.c.hear("a", there=(), after_s=1.0)

    def _reach_unhidden(self, state):
        if state in (P.STARTING, P.RUNNING):
            self.c.hear("a", self.t.report("g", 1, 0, state.lower()))
        elif state is P.UNREADABLE:
            self.c.tell(m.PartUnreadable("g", 1, 0, "it cannot be read"))
        elif state is P.ENDED:
            self.happen("reported_ended")

    def happen(self, event):
        c, t = self.c, self.t
        is_read = not c.control.attempts["g"].parts[0].unreadable_reason
        unreadable = m.PartUnreadable("g", 1, 0, "it cannot be read")
        report = lambda phase: c.hear("a", t.report("g", 1, 0, phase), after_s=1.0)  # noqa: E731
        if event.startswith("listed_"):
            c.hear("a", after_s=1.0)
            return
        {
            "reported_starting": lambda: report("starting"),
            "reported_running": lambda: report("running"),
            "reported_ended": lambda: c.hear("a", t.ended("g", 1, 0, "succeeded", codes={0: 0})),
            "unreadable": lambda: c.tell(unreadable) if is_read else report("running"),
            "not_listed": lambda: c.hear("a", there=(), after_s=1.0),
            "not_started": lambda: c.tell(m.LaunchFailed("g", 1, maybe_started=("b",), **NO_ANSWER)),
            "start_unanswered": lambda: c.tell(m.LaunchFailed("g", 1, maybe_started=("a", "b"), **NO_ANSWER)),
            "expired": self._expire,
        }[event]()

    def _expire(self):
        self.silence(8)
        self.c.tell(m.FenceAnswered("g", 2, current_epoch=2))
        self.silence(14)


class StopStory(Story):
    def state(self):
        return stop_state(self.c.control.attempts["j"].stop_requests.get("a"))

    def reach(self, state, event):
        self.run()
        for reached, then in ((S.REQUESTED, "wanted"), (S.ACKNOWLEDGED, "answered")):
            if self.state() is not state:
                self.happen(then)
                assert self.state() is reached

    def happen(self, event):
        c = self.c
        {
            "wanted": lambda: c.tell(m.DrainRequested("a", now=True)),
            "answered": lambda: c.tell(m.StopAnswered("a", "j", 1, "preempt"), 0.1),
            "failed": lambda: c.tell(m.StopAnswered("a", "j", 1, "preempt", "no answer")),
            "timed_out": lambda: c.hear_all("a", "b", seconds=20),
            "mode_changed": lambda: c.tell(m.CancelRequested("j")),
            "voided": self.rejoin,
        }[event]()


STORIES = {"attempt": AttemptStory, "part": PartStory, "stop request": StopStory}
ROWS = [(machine, *row) for machine, table in TABLES.items() for row in table]
IGNORED = [
    (machine, *row)
    for machine, pairs in zip(TABLES, (IGNORED_BY_ATTEMPT, IGNORED_BY_PART, IGNORED_BY_STOP), strict=True)
    for row in sorted(pairs)
]


@pytest.fixture
def tell(c, w, t):
    """Let an event happen in a state. What was seen of it."""

    def tell(machine, state, event):
        story = STORIES[machine](c, w, t)
        story.reach(state, event)
        assert story.state() is state
        c.watch.observed.clear()
        story.happen(event)
        return story, [seen for seen in c.watch.observed if seen.machine == machine]

    return tell


@pytest.mark.parametrize(("machine", "state", "event"), ROWS, ids=map(ids, ROWS))
def test_a_row_that_is_removed_from_its_table_is_missed(tell, machine, state, event):
    _, observed = tell(machine, state, event)
    assert [(state, event)] in [explaining_rows(seen, TABLES[machine]) for seen in observed]
    without = {row: after for row, after in TABLES[machine].items() if row != (state, event)}
    assert not all(is_explained(seen, without) for seen in observed)


@pytest.mark.parametrize(("machine", "state", "event"), ROWS, ids=map(ids, ROWS))
def test_the_controller_does_not_work_without_a_row(tell, monkeypatch, machine, state, event):
    """It ignores the event, which fails this test: the tables say what it does, and not only what it should do."""
    name = {"attempt": "ATTEMPT", "part": "PART", "stop request": "STOP"}[machine]
    rows = {row: after for row, after in getattr(transitions, name).items() if row != (state, event)}
    monkeypatch.setattr(transitions, name, rows)
    with pytest.raises(AssertionError, match=UNEXPECTED):
        tell(machine, state, event)


@pytest.mark.parametrize("state", TIMERS)
def test_a_time_limit_that_is_removed_or_never_passes_is_missed(tell, monkeypatch, state):
    machine = "attempt" if state in A.__members__ else "stop request"
    monkeypatch.setitem(TIMERS, state, float("inf"))
    with pytest.raises(AssertionError):
        assert "timed_out" in [seen.event for seen in tell(machine, state, "timed_out")[1]]


@pytest.mark.parametrize("state", TIMERS)
def test_the_controller_does_not_work_without_a_time_limit(tell, monkeypatch, state):
    monkeypatch.delitem(TIMERS, state)
    with pytest.raises(KeyError):
        tell("attempt" if state in A.__members__ else "stop request", state, "timed_out")


@pytest.mark.parametrize(("machine", "state", "event"), IGNORED, ids=map(ids, IGNORED))
def test_what_is_to_be_ignored_changes_no_state(tell, machine, state, event):
    story, observed = tell(machine, state, event)
    assert (state, event) in [(seen.before, seen.event) for seen in observed], "it came"
    assert story.state() is state
    assert not [seen for seen in observed if seen.after is not None and seen.after is not seen.before]


def test_no_pair_is_both_in_a_table_and_to_be_ignored():
    for table, ignored in ((ATTEMPT, IGNORED_BY_ATTEMPT), (PART, IGNORED_BY_PART), (STOP, IGNORED_BY_STOP)):
        assert not table.keys() & ignored


@pytest.mark.parametrize("machine", TABLES)
def test_every_state_can_be_reached_and_only_an_end_is_never_left(machine):
    table = TABLES[machine]
    kind = type(next(iter(table))[0])
    reached = set(FIRST[kind])
    while more := {after for (state, _), after in table.items() if state in reached} - reached:
        reached |= more
    assert reached == set(kind)
    assert set(kind) - {state for state, _ in table} == {"ENDED"} & set(kind)


def test_every_state_has_a_meaning_and_each_with_a_limit_a_row_for_it():
    assert ([*ATTEMPT_MEANING], [*PART_MEANING], [*STOP_MEANING]) == ([*A], [*P], [*S])
    assert TIMERS.keys() == {state for state, event in (*ATTEMPT, *STOP) if event == "timed_out"}


@pytest.mark.parametrize("machine", ["attempt", "part"])
def test_two_rows_between_the_same_states_follow_from_different_messages(machine):
    """Else one that is missing would be covered by the other. Whether a part is listed or reported is known exactly."""
    pairs = Counter((s, after, message) for (s, e), after in TABLES[machine].items() for message in MESSAGES[e])
    assert {before for (before, _, _), count in pairs.items() if count > 1} <= {P.UNCONFIRMED}
