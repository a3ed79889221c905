"""Consistency of the controller's state of attempts, checked after every cycle (law I18)."""

from collections.abc import Iterator, Mapping

from orchestrator.core.controller.attempts import PHASE_ORDER, AttemptPart, LiveAttempt
from orchestrator.core.controller.draft import Control
from orchestrator.core.states import WAITING

Problem = tuple[str, str]
"""(job, what is wrong)"""


def find_contradictions(control: Control) -> Iterator[Problem]:
    held: dict[tuple[str, int], str] = {}
    for job, live in control.attempts.items():
        yield from ((job, problem) for problem in (*_of_table(control, live), *_of_attempt(control, live)))
        for rank, part in enumerate(live.parts):
            yield from ((job, problem) for problem in _of_part(control, live, rank, part))
            for number in part.numbers:
                if (part.devices_id, number) in held:
                    yield job, f"{part.devices_id} [{number}] is held by {held[part.devices_id, number]} as well"
                held[part.devices_id, number] = job
    for job, record in control.records.items():
        if record.job.overtaken != (job in control.epoch_guards):
            yield job, "its record and the controller disagree on whether it waits for a newer attempt"


def _of_table(control: Control, live: LiveAttempt) -> Iterator[str]:
    record = control.records.get(live.job)
    if record is None or record.live_attempt is None or record.live_attempt.epoch != live.epoch:
        yield "its attempt is not in the log"
    elif record.job.state in WAITING:
        yield f"is {record.job.state} and has an attempt"
    if len({part.node for part in live.parts}) != len(live.parts):
        yield "has two parts on one node"
    if live.allocation_name in control.pending_releases:
        yield "its devices are being released"


def _of_attempt(control: Control, live: LiveAttempt) -> Iterator[str]:
    is_requested, is_raised = live.fence_requested_s is not None, live.fenced_s is not None
    if live.launching and (
        live.stop_requests or is_requested or live.lowering or any(part.doubt for part in live.parts)
    ):
        yield "is being launched, and is also stopped, fenced off or in doubt"
    if (
        is_requested
        and live.is_fence_checked
        and not live.superseded_reason
        and control.raised_fences.get(live.job) != live.epoch + 1
    ):
        yield f"its fence is raised, but the controller holds its epoch as {control.raised_fences.get(live.job)}"
    if is_raised and not (is_requested and live.is_fence_checked):
        yield "its fence counts as raised, but no raise was requested"
    if live.superseded_reason and not is_requested:
        yield "is superseded, but no raise of its fence was requested"
    if live.lowering and (is_requested or live.superseded_reason or not live.is_fence_checked):
        yield "its fence is being lowered and raised at the same time"
    if live.is_over and not live.launching:
        yield "all its parts have ended, but the attempt has not"


def _of_part(control: Control, live: LiveAttempt, rank: int, part: AttemptPart) -> Iterator[str]:
    if (part.phase == "ended") != (part.outcome is not None):
        yield f"part {rank} is {part.phase or 'unreported'} with the outcome {part.outcome}"
    if part.outcome is not None and part.doubt:
        yield f"part {rank} has ended and is in doubt"
    if live.job not in control.on_node.get(part.node, ()):
        yield f"part {rank} is missing from the controller's index of {part.node}"
    node, key = control.nodes.get(part.node), live.part_key(rank)
    if node is not None and not node.duplicate_of and key in node.untracked:
        yield f"part {rank} counts as an untracked attempt on {part.node}"
    listed_s = node.list_requested_s if node is not None and not live.launching else None
    if part.doubt and node is not None and listed_s is not None and listed_s > live.since_s and key in node.listed:
        yield f"part {rank} is in doubt, although the newest list of {part.node} has it: {part.doubt}"


def find_phase_regressions(before: Mapping[str, LiveAttempt], after: Mapping[str, LiveAttempt]) -> Iterator[Problem]:
    """Find parts whose phase returned to an earlier one. `before`, `after`: attempts before and after a cycle."""
    for job, live in after.items():
        previous = before.get(job)
        if previous is None or previous is live or previous.epoch != live.epoch:
            continue
        for rank, (old, new) in enumerate(zip(previous.parts, live.parts, strict=True)):
            if PHASE_ORDER.index(new.phase) < PHASE_ORDER.index(old.phase):
                yield job, f"part {rank} was {old.phase} and is {new.phase or 'unreported'}"
