"""Kinds of failure of an attempt, one row each: which cause decides, what follows it, and what users read about it.

To add a kind: a row here, and the code that detects it. The protocol, the end of an attempt, retry, job specs, the
simulator and docs/reference/failures.md read this table. Errors and docs list the kinds in its order. Standard library
only, since supervisors import it.
"""

from dataclasses import dataclass
from typing import Literal

Reaction = Literal["restart", "next", "retry", "fail", "repeat"]
REACTIONS: dict[Reaction, tuple[str, str]] = {
    "restart": ("restart", "unchanged"),
    "next": ("restart", "the next one"),
    "retry": ("interruption", "the next one"),
    "fail": ("the end of the job", ""),
    "repeat": ("nothing", "unchanged, that node last"),
}
"""By reaction: what the failure counts as, and which candidate comes first afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureKind:
    """A kind of failure.

    `meaning` and `remedy` are for users: clauses without a full stop at the end; `guide` is the page below docs/guides
    that has more. `cause_rank`: if several nodes failed, the lowest decides (orchestrator/core/attempt/
    attempt_outcome.py has the other ranks): 1 precedes everything, 2 cannot follow from the failure of another rank,
    4 may. `reaction`: what follows unless the job's `recovery.on_events` says otherwise.

    `is_reported_by_rank`: a rank may report it itself. `part_state`: state of a part of an attempt whose end its node
    has not reported. `holds_in_any_state`: it is the kind even if the attempt ended as lost or stopped; others count
    as `lost` then. `exit_codes`: which exit codes of ranks still say something, as we or the kernel kill ranks after
    some failures. `ignored_by`: setting that ignores it, "" if none does.
    """

    meaning: str
    remedy: str
    cause_rank: Literal[1, 2, 4]
    reaction: Reaction
    guide: str = ""
    is_reported_by_rank: bool = False
    part_state: Literal["failed", "lost"] = "failed"
    holds_in_any_state: bool = False
    exit_codes: Literal["all", "without signals", "none"] = "all"
    ignored_by: str = ""


FAILURE_KINDS: dict[str, FailureKind] = {
    "user": FailureKind(
        meaning="the job's code raised an error, or ended with an exit code other than 0",
        remedy="read the traceback in `polyfleet show JOB` and the output in `polyfleet logs JOB`",
        cause_rank=4,
        reaction="restart",
        is_reported_by_rank=True,
    ),
    "oom": FailureKind(
        meaning=(
            "memory ran out: torch or Python reported it, or the kernel killed a rank for it. The message has the peak "
            "and the limit"
        ),
        remedy="load less at once, lower `batch_size`, or put a candidate with more memory first",
        cause_rank=2,
        reaction="next",
        is_reported_by_rank=True,
        holds_in_any_state=True,
        exit_codes="without signals",
    ),
    "signal": FailureKind(
        meaning=(
            "a rank was killed by a signal: its own crash, or from outside (SIGHUP, SIGINT, SIGKILL, SIGTERM), which "
            "counts as `lost`"
        ),
        remedy="after a crash, read the last lines of `polyfleet logs JOB`; after a kill from outside, nothing",
        cause_rank=2,
        reaction="restart",
    ),
    "storage": FailureKind(
        meaning=(
            "a file system or the job's folder was full; the message names it and its free space. Or no checkpoint to "
            "resume from is sound; the message names file and chunk"
        ),
        remedy="free disk space or keep fewer checkpoints (`checkpoint: {keep: 1}`), or check the checkpoint it names",
        cause_rank=2,
        reaction="next",
        is_reported_by_rank=True,
        holds_in_any_state=True,
        exit_codes="without signals",
    ),
    "hang": FailureKind(
        meaning="the ranks made no progress; their stacks are in the log",
        remedy="find the call in which each rank waits in `polyfleet logs JOB`, or raise `recovery.hang_after`",
        cause_rank=2,
        reaction="restart",
        guide="training.md#hangs",
        exit_codes="without signals",
        ignored_by="hang_after: never",
    ),
    "nan": FailureKind(
        meaning="a reported number, or a tensor of a checkpoint, was not a finite number",
        remedy="lower the learning rate or check the data, or set `recovery.on_events` to `{nan: ignore}`",
        cause_rank=2,
        reaction="fail",
        guide="training.md#numbers-that-are-not-finite",
        is_reported_by_rank=True,
        exit_codes="without signals",
        ignored_by="on_events",
    ),
    "start": FailureKind(
        meaning="a rank's command could not be started",
        remedy="check that the command exists in the pool's environment or in the submitted folder, and is executable",
        cause_rank=4,
        reaction="next",
    ),
    "launch": FailureKind(
        meaning="no rank was started: a node was gone or did not respond",
        remedy="nothing, it is tried again; if that repeats, `polyfleet doctor` says what is wrong with the nodes",
        cause_rank=2,
        reaction="repeat",
        part_state="lost",
    ),
    "lost": FailureKind(
        meaning=(
            "the node or its agent was lost, or the attempt was cut off from the fleet until its lease ended or its "
            "fence was raised"
        ),
        remedy="nothing, the job continues elsewhere; `polyfleet doctor` says what is wrong with the node",
        cause_rank=2,
        reaction="retry",
        is_reported_by_rank=True,  # its save was refused, since the attempt was or may have been replaced
        part_state="lost",
    ),
    "unreadable": FailureKind(
        meaning="the job's code broke a file that the node reads",
        remedy="do not write `events.jsonl` in `POLYFLEET_ATTEMPT_DIR`, and write `result.json` as a JSON object",
        cause_rank=1,
        reaction="restart",
        guide="troubleshooting.md#failure-kind-unreadable",
        holds_in_any_state=True,
        exit_codes="none",
    ),
    "internal": FailureKind(
        meaning="an error in Polyfleet itself",
        remedy="open an issue with the traceback",
        cause_rank=4,
        reaction="restart",
        is_reported_by_rank=True,
    ),
}

UNREPORTED = FailureKind(meaning="nothing was reported but exit codes", remedy="", cause_rank=4, reaction="restart")


def failure_kind(name: str) -> FailureKind:
    """Return the row of a kind; UNREPORTED for "". Raises KeyError for a name that is not in the table."""
    return FAILURE_KINDS[name] if name else UNREPORTED
