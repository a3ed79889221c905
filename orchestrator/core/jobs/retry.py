"""Decide what follows when an attempt has ended: a pure table of causes, budgets and pauses.

| how it ended                                            | counts as    | next candidate | pause   |
|---------------------------------------------------------|--------------|----------------|---------|
| succeeded                                               |              |                |         |
| preempted, or killed after a stop was requested         | interruption | unchanged      | none    |
| exit code in `retry_exit_codes`                         | interruption | unchanged      | growing |
| `user` before it was started, e.g. a secret is not set  | the end      |                |         |
| any other failure: by the `reaction` of its kind        | (REACTIONS)  | (REACTIONS)    | growing |

Kinds of failure and REACTIONS are in workers/protocol/failure_kinds.py. A rank killed from outside counts as `lost`.
`recovery.on_events` replaces the reaction: `restart` and `next` (a restart on the next candidate) count against
`max_restarts`, `retry` against `max_interruptions`, `fail` ends the job.

"Killed from outside" means a SIGKILL, SIGTERM, SIGINT or SIGHUP that we did not send; the supervisor recognises the
kernel's OOM killer and reports `oom`. A pause doubles with each restart or interruption, from `backoff_s` to
MAX_BACKOFF_S. After a lost node it counts from the fence, since waiting for the lease to expire was a pause, too. The
nodes where an attempt failed are tried last.
"""

from dataclasses import dataclass

from orchestrator.core.model import Job
from orchestrator.core.states import State
from workers.protocol.failure_kinds import failure_kind

MAX_BACKOFF_S = 60.0
FROM_OUTSIDE = {1: "SIGHUP", 2: "SIGINT", 9: "SIGKILL", 15: "SIGTERM"}


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """End of an attempt on all its nodes.

    `state` is one of OUTCOMES in workers/protocol/messages.py, `lost` if its lease expired. `failure` is the kind of
    the first failure (one of FAILURE_KINDS) or "", `message` its text. `exit_codes` are by rank, < 0 for a signal.
    `nodes` are those where it failed. `stop_reason` is why a stop was requested, "" if none was. `is_user_error`: an
    error of the user prevented the start.
    """

    state: str
    candidate: int = 0
    failure: str = ""
    message: str = ""
    exit_codes: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    stop_reason: str = ""
    is_user_error: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """Event to write, and its data: see orchestrator/core/jobs/fold.py."""

    event: str
    reason: str
    restarts: int
    interruptions: int
    first_candidate: int
    pause_s: float = 0.0
    refusals: int = 0
    avoid: tuple[str, ...] = ()


def decide_retry(job: Job, ended: AttemptEnd) -> Decision:
    """Decide what follows the end of an attempt. `job` is its state before that end.

    Not for a cancelled job, whose only event is `released`.
    """
    if ended.state == "succeeded":
        return Decision("finished", "every rank ended with exit code 0", *_counts(job), job.first_candidate)
    if ended.is_user_error:
        return _give_up(job, _cause(ended), "")
    if failure_kind(ended.failure).reaction == "repeat":
        return _launch_failed(job, ended)
    if ended.state == "preempted" or (job.state is State.SAVING and _killed(ended)):
        cause = ended.stop_reason or "its node stopped the attempt"
        reason = f"{cause}; {ended.message}" if ended.state == "preempted" and ended.message else cause
        return _interrupted(job, ended, reason, moves_on=False, pause=False)
    return _failed(job, ended)


def _failed(job: Job, ended: AttemptEnd) -> Decision:
    if job.recovery.on_disconnect == "stop" and ended.failure == "lost":
        return _give_up(job, f"{ended.message}; recovery.on_disconnect is stop", "")
    kind = _kind(ended)
    action = job.recovery.on_events.get(kind, "")
    if action == "fail":
        return _give_up(job, f"{ended.message}; recovery.on_events sets {kind} to fail", "")
    retried = not action and failure_kind(ended.failure).exit_codes != "none"
    if retried and (codes := sorted({c for c in ended.exit_codes if c in job.recovery.retry_exit_codes})):
        listed = ", ".join(str(code) for code in codes)
        return _interrupted(job, ended, f"exit code {listed} is in recovery.retry_exit_codes", moves_on=False)
    action = action or failure_kind(kind).reaction
    if action == "fail":
        return _give_up(job, ended.message, f"recovery.on_events ({kind}: restart)")
    if action == "retry":
        killed = kind == "lost" and ended.failure != "lost" and _killed(ended)
        cause = f"a rank was killed by {_killer(ended)} from outside" if killed else _cause(ended)
        return _interrupted(job, ended, cause, moves_on=True)
    return _restarted(job, ended, moves_on=action == "next")


def _kind(ended: AttemptEnd) -> str:
    """Return the kind of failure: `lost` if a rank was killed from outside or no failure was reported."""
    unreported = ended.state != "failed" and not failure_kind(ended.failure).holds_in_any_state
    return "lost" if unreported or _killed(ended) else ended.failure


def _launch_failed(job: Job, ended: AttemptEnd) -> Decision:
    """Let the job wait again, longer each time. A failed launch is not its fault and does not count."""
    times = job.refusals + 1
    reason = f"the attempt could not be started{f' {times} times in a row' if times > 1 else ''}: {ended.message}"
    pause_s = backoff_s(job, times)
    return Decision("interrupted", reason, *_counts(job), job.first_candidate, pause_s, times, ended.nodes)


def _interrupted(job: Job, ended: AttemptEnd, cause: str, *, moves_on: bool, pause: bool = True) -> Decision:
    used, limit = job.interruptions, job.recovery.max_interruptions
    if 0 <= limit <= used:
        return _give_up(job, f"{cause}; all {limit} interruptions are used up", "recovery.max_interruptions")
    first = ended.candidate + 1 if moves_on else job.first_candidate
    pause_s = backoff_s(job, used + 1) if pause else 0.0
    avoid = ended.nodes if moves_on else ()
    return Decision("interrupted", cause, job.restarts, used + 1, first, pause_s, avoid=avoid)


def _restarted(job: Job, ended: AttemptEnd, *, moves_on: bool) -> Decision:
    used, limit = job.restarts, job.recovery.max_restarts
    cause = _cause(ended)
    if 0 <= limit <= used:
        also = f" (after {used} of {limit} restarts)" if limit else ""
        return _give_up(job, f"{cause}{also}", "recovery.max_restarts" if limit else "")
    first = ended.candidate + 1 if moves_on else job.first_candidate
    reason = f"restart {used + 1}{f' of {limit}' if limit > 0 else ''}: {cause}"
    avoid = ended.nodes if moves_on else ()
    return Decision("interrupted", reason, used + 1, job.interruptions, first, backoff_s(job, used + 1), avoid=avoid)


def backoff_s(job: Job, times: int) -> float:
    """Return 1, 2, 4, … times the job's first pause, at most MAX_BACKOFF_S, for `times` = 1, 2, 3, …"""
    return min(MAX_BACKOFF_S, job.recovery.backoff_s * 2.0 ** min(times - 1, 32))


def _cause(ended: AttemptEnd) -> str:
    if ended.message:
        return ended.message
    codes = ", ".join(str(code) for code in ended.exit_codes)
    return f"exit codes {codes}" if codes else f"the attempt was {ended.state}"


def _give_up(job: Job, reason: str, setting: str) -> Decision:
    message = f"{reason}; to retry in this case, change {setting}" if setting else reason
    return Decision("failed", message, *_counts(job), job.first_candidate)


def _counts(job: Job) -> tuple[int, int]:
    return job.restarts, job.interruptions


def _killed(ended: AttemptEnd) -> bool:
    """Return True if a signal that programs do not send themselves ended the first failed rank or all failed ranks.

    After one rank is killed the others often fail too, of a broken connection.
    """
    if failure_kind(ended.failure).exit_codes != "all":
        return False
    signals = [_signal(code) for code in ended.exit_codes if code]
    outside = [number for number in signals if number in FROM_OUTSIDE]
    crashed = [number for number in signals if number and number not in FROM_OUTSIDE]
    return bool(outside) and (outside == signals or (ended.failure == "signal" and not crashed))


def _killer(ended: AttemptEnd) -> str:
    return next(FROM_OUTSIDE[_signal(code)] for code in ended.exit_codes if _signal(code) in FROM_OUTSIDE)


def _signal(code: int) -> int:
    """Return the signal's number, 0 for a normal exit. A shell reports its child's signal as 128 + number."""
    return -code if code < 0 else code - 128 if code > 128 else 0
