"""What must be true of the controller's state about attempts after every turn, whatever happened (law I18)."""

from collections.abc import Iterator, Mapping

from orchestrator.core.attempts import ORDER, Live, Part
from orchestrator.core.draft import Control
from orchestrator.core.states import WAITING

Found = tuple[str, str]
"""A job and what is wrong."""


def contradictions(control: Control) -> Iterator[Found]:
    held: dict[tuple[str, int], str] = {}
    for job, live in control.lives.items():
        yield from ((job, what) for what in (*_followed(control, live), *_of_attempt(control, live)))
        for rank, part in enumerate(live.parts):
            yield from ((job, what) for what in _of_part(control, live, rank, part))
            for number in part.numbers:
                if (part.devices_id, number) in held:
                    yield job, f"{part.devices_id} [{number}] is held by {held[part.devices_id, number]} as well"
                held[part.devices_id, number] = job
    for job, record in control.records.items():
        if record.job.overtaken != (job in control.overtaken):
            yield job, "a newer attempt of it is waited for, and nothing says so, or the other way round"


def _followed(control: Control, live: Live) -> Iterator[str]:
    record = control.records.get(live.job)
    if record is None or record.live is None or record.live.epoch != live.epoch:
        yield "the log has no such attempt"
    elif record.job.state in WAITING:
        yield f"is {record.job.state} and has an attempt"
    if len({part.node for part in live.parts}) != len(live.parts):
        yield "has two parts on one node"
    if live.place in control.releasing:
        yield "what it uses is being released"


def _of_attempt(control: Control, live: Live) -> Iterator[str]:
    asked, stands = live.fence_asked_s is not None, live.fenced_s is not None
    if live.launching and (live.asked or asked or live.lowering or any(part.unsure for part in live.parts)):
        yield "is being launched, and is stopped, fenced off or in doubt"
    if asked and live.fence_known and not live.overruled and control.raised.get(live.job) != live.epoch + 1:
        yield f"its fence is raised, and stands at {control.raised.get(live.job)} as far as is known"
    if stands and not (asked and live.fence_known):
        yield "its fence stands, and nobody raised it"
    if live.overruled and not asked:
        yield "is superseded, and its fence is not to stand"
    if live.lowering and (asked or live.overruled or not live.fence_known):
        yield "its fence is being lowered and raised"
    if live.over and not live.launching:
        yield "every part has ended, and it has not"


def _of_part(control: Control, live: Live, rank: int, part: Part) -> Iterator[str]:
    if (part.phase == "ended") != (part.outcome is not None):
        yield f"part {rank} is {part.phase or 'unreported'} with the outcome {part.outcome}"
    if part.outcome is not None and part.unsure:
        yield f"part {rank} has ended and is in doubt"
    if live.job not in control.on_node.get(part.node, ()):
        yield f"part {rank} is not looked for on {part.node}"
    node, key = control.nodes.get(part.node), live.part_key(rank)
    if node is not None and not node.same_as and key in node.strangers:
        yield f"part {rank} counts on {part.node} as none of ours"
    listed_s = node.listed_s if node is not None and not live.launching else None
    if part.unsure and node is not None and listed_s is not None and listed_s > live.since_s and key in node.listed:
        yield f"part {rank} is in doubt, and the newest list of {part.node} has it: {part.unsure}"


def steps_back(was: Mapping[str, Live], now: Mapping[str, Live]) -> Iterator[Found]:
    """Parts whose phase is an earlier one than before."""
    for job, live in now.items():
        before = was.get(job)
        if before is None or before is live or before.epoch != live.epoch:
            continue
        for rank, (old, new) in enumerate(zip(before.parts, live.parts, strict=True)):
            if ORDER.index(new.phase) < ORDER.index(old.phase):
                yield job, f"part {rank} was {old.phase} and is {new.phase or 'unreported'}"
