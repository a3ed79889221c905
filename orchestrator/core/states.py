"""State machine of a job as a table: (state, event) -> state. Code, documentation and tests use this table."""

from enum import StrEnum

from cluster.errors import PolyfleetError


class State(StrEnum):
    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SAVING = "SAVING"
    RECOVERING = "RECOVERING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


S = State
WAITING = frozenset({S.PENDING, S.RECOVERING})
ACTIVE = frozenset({S.STARTING, S.RUNNING, S.SAVING})
TERMINAL = frozenset({S.SUCCEEDED, S.FAILED, S.CANCELLED})

MEANING: dict[State, str] = {
    S.PENDING: "accepted and durable; waits for a device, `explain` says for which and why",
    S.STARTING: "placed: devices are reserved, the agents make the folders and start the ranks",
    S.RUNNING: "every rank has started",
    S.SAVING: "a stop was requested: the ranks save a checkpoint within their grace period",
    S.RECOVERING: "the attempt ended early; the job waits for its next placement",
    S.SUCCEEDED: "every rank ended with exit code 0",
    S.FAILED: "ended for good with an error; `show` prints it",
    S.CANCELLED: "ended by its user",
}

MOVES: dict[tuple[State, str], State] = {
    (S.PENDING, "placed"): S.STARTING,
    (S.PENDING, "refused"): S.FAILED,
    (S.STARTING, "started"): S.RUNNING,
    (S.STARTING, "finished"): S.SUCCEEDED,
    (S.STARTING, "failed"): S.FAILED,
    (S.STARTING, "interrupted"): S.RECOVERING,
    (S.STARTING, "preempted"): S.SAVING,
    (S.RUNNING, "finished"): S.SUCCEEDED,
    (S.RUNNING, "failed"): S.FAILED,
    (S.RUNNING, "interrupted"): S.RECOVERING,
    (S.RUNNING, "preempted"): S.SAVING,
    (S.SAVING, "started"): S.SAVING,
    (S.SAVING, "finished"): S.SUCCEEDED,
    (S.SAVING, "failed"): S.FAILED,
    (S.SAVING, "interrupted"): S.RECOVERING,
    (S.RECOVERING, "placed"): S.STARTING,
    (S.RECOVERING, "refused"): S.FAILED,
} | {(s, "cancelled"): S.CANCELLED for s in S if s not in TERMINAL}

EVENTS = tuple(dict.fromkeys(event for _, event in MOVES))


class InvalidMove(PolyfleetError):
    def __init__(self, state: str, event: str):
        super().__init__(
            f"a job in {state} has no move for event {event!r}",
            "open an issue: the state table forbids the move",
        )
        self.args = (state, event)


def move(state: State, event: str) -> State:
    """Return the next state. Raises InvalidMove if the table has no such transition."""
    try:
        return MOVES[state, event]
    except KeyError:
        raise InvalidMove(state, event) from None
