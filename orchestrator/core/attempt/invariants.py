"""What holds of every attempt between two steps, by its state. Checked after each step in tests, never in production.

A limit that depends on more than one step, e.g. for how long a disconnection explains failures, is a law of the
simulator (docs/simulator.md).
"""

from collections.abc import Callable, Iterator

from orchestrator.core.attempt.attempt_states import TIMERS
from orchestrator.core.attempt.stop_modes import is_broken
from orchestrator.core.attempt.transitions import REPORTED, STOOD
from orchestrator.core.controller.attempts import UNFENCED, AttemptPart, AttemptState, LiveAttempt, PartState
from orchestrator.core.controller.draft import Control
from orchestrator.core.states import WAITING

A = AttemptState
Problem = tuple[str, str]
"""(job, what is wrong)"""
RAISES = frozenset({A.FENCING, A.FENCED, A.LOWERING})


def check(control: Control) -> list[str]:
    """Return what is wrong with the attempts of this state: sentences that begin with the job."""
    return [f"{job}: {problem}" for job, problem in find_contradictions(control)]


def find_contradictions(control: Control) -> Iterator[Problem]:
    held: dict[tuple[str, int], str] = {}
    for job, attempt in control.attempts.items():
        yield from ((job, problem) for rule in RULES for problem in rule(control, attempt, attempt.state))
        for rank, part in enumerate(attempt.parts):
            yield from ((job, problem) for problem in _of_part(control, attempt, rank, part))
            for number in part.numbers:
                if (part.devices_id, number) in held:
                    yield job, f"{part.devices_id} [{number}] is held by {held[part.devices_id, number]} as well"
                held[part.devices_id, number] = job
    yield from _of_records(control)
    yield from _of_index(control)


def _of_records(control: Control) -> Iterator[Problem]:
    for job, record in control.records.items():
        if record.job.overtaken != (job in control.epoch_guards):
            yield job, "its record and the controller disagree on whether it waits for a newer attempt"
        if record.live_attempt is not None and job not in control.attempts:
            yield job, "its attempt is in the log, and is not tracked"


def _of_index(control: Control) -> Iterator[Problem]:
    for name, jobs in control.on_node.items():
        for job in jobs:
            attempt = control.attempts.get(job)
            if attempt is None or name not in {part.node for part in attempt.parts}:
                yield job, f"the controller's index has it on {name}, where it has no part"


def _of_table(control: Control, attempt: LiveAttempt, state: AttemptState) -> Iterator[str]:
    record = control.records.get(attempt.job)
    if record is None or record.live_attempt is None or record.live_attempt.epoch != attempt.epoch:
        yield "its attempt is not in the log"
    elif record.job.state in WAITING:
        yield f"is {record.job.state} and has an attempt"
    if len({part.node for part in attempt.parts}) != len(attempt.parts):
        yield "has two parts on one node"
    if attempt.allocation_name in control.pending_releases:
        yield "its devices are being released"
    if attempt.is_over and state is not A.LAUNCHING:
        yield "all its parts have ended, but the attempt has not"


def _of_launch(control: Control, attempt: LiveAttempt, state: AttemptState) -> Iterator[str]:
    is_doubtful = any(part.state is PartState.UNCONFIRMED for part in attempt.parts)
    if state is A.LAUNCHING and (attempt.stop_requests or attempt.superseded_reason or is_doubtful):
        yield "is being launched, and is also stopped, fenced off or in doubt"


def _of_fence(control: Control, attempt: LiveAttempt, state: AttemptState) -> Iterator[str]:
    raised = control.raised_fences.get(attempt.job)
    if state in RAISES and raised != attempt.epoch + 1:
        yield f"is {state}, but the controller holds the fence that it raised as {raised}"
    if (attempt.fenced_s is not None) != (state in STOOD):
        yield f"is {state}, and its fence {'counts' if attempt.fenced_s is not None else 'does not count'} as stored"
    if attempt.fence and attempt.fence.stored_s is not None and attempt.fence.stored_s < attempt.fence.since_s:
        yield "its fence was stored before it was requested"
    if (attempt.fence is None) != (state in UNFENCED):
        yield f"is {state} with {attempt.fence}"
    if attempt.superseded_reason and state not in (A.FENCING, A.SUPERSEDED):
        yield f"is superseded and {state}"
    if state is A.SUPERSEDED and not attempt.superseded_reason:
        yield "is superseded without a reason"


def _of_timers(control: Control, attempt: LiveAttempt, state: AttemptState) -> Iterator[str]:
    """Requests about fences are repeated; a job that waits for its node, or ends anyway, needs only some of them."""
    if not control.is_joined or state not in TIMERS or control.ticked_s < control.joined_s:
        return
    if state in (A.CHECKING, A.FENCING):
        record = control.records.get(attempt.job)
        if (
            record is None
            or record.job.recovery.on_disconnect == "wait"
            or any(is_broken(part) for part in attempt.parts)
        ):
            return
    sent_s = attempt.fence.sent_s if attempt.fence else attempt.read_s
    if control.ticked_s - sent_s > TIMERS[state]:
        yield f"is {state}, and its request was not repeated for {control.ticked_s - sent_s:.1f} s"


RULES: tuple[Callable[[Control, LiveAttempt, AttemptState], Iterator[str]], ...] = (
    *(_of_table, _of_launch, _of_fence, _of_timers),
)


def _of_part(control: Control, attempt: LiveAttempt, rank: int, part: AttemptPart) -> Iterator[str]:
    if (part.state is PartState.ENDED) != (part.outcome is not None):
        yield f"part {rank} is {part.state} with the outcome {part.outcome}"
    if (part.state is PartState.UNCONFIRMED) != bool(part.doubt):
        yield f"part {rank} is {part.state} with the doubt {part.doubt!r}"
    if part.state is PartState.UNREADABLE and not part.unreadable_reason:
        yield f"part {rank} is unreadable without a reason"
    if part.state in REPORTED and part.state is not part.last_reported:
        yield f"part {rank} is {part.state}, but was last reported as {part.last_reported}"
    if attempt.job not in control.on_node.get(part.node, ()):
        yield f"part {rank} is missing from the controller's index of {part.node}"
    node, key = control.nodes.get(part.node), attempt.part_key(rank)
    if node is None:
        return
    if not node.duplicate_of and key in node.untracked:
        yield f"part {rank} counts as an untracked attempt on {part.node}"
    is_doubtful = part.state is PartState.UNCONFIRMED and attempt.state is not A.LAUNCHING
    listed_s = node.list_requested_s if is_doubtful else None
    if listed_s is not None and listed_s > attempt.since_s and key in node.listed:
        yield f"part {rank} is in doubt, although the newest list of {part.node} has it: {part.doubt}"
