"""What follows when an attempt has ended: a pure table of causes, budgets and pauses.

| how it ended                                            | counts as    | next candidate | pause   |
|---------------------------------------------------------|--------------|----------------|---------|
| succeeded                                               |              |                |         |
| preempted, or killed while it was asked to stop         | interruption | unchanged      | none    |
| node or agent lost; a rank killed from outside          | interruption | the next one   | growing |
| exit code in `retry_exit_codes`                         | interruption | unchanged      | growing |
| no rank was started: the order could not be given      | nothing      | the next one   | growing |
| memory ran out on the device; the ranks did not start   | restart      | the next one   | growing |
| the job's own code failed, or crashed by its own signal | restart      | unchanged      | growing |
| its ranks broke what the node reads of them             | restart      | unchanged      | growing |

"Killed from outside" is SIGKILL, SIGTERM, SIGINT or SIGHUP. The kernel's OOM killer looks the same unless the
supervisor reports kind `oom`. A pause doubles with each restart or interruption, from `backoff_s` to MAX_BACKOFF_S.
"""

from dataclasses import dataclass

from orchestrator.core.model import Job
from orchestrator.core.states import State

MAX_BACKOFF_S = 60.0
FROM_OUTSIDE = {1: "SIGHUP", 2: "SIGINT", 9: "SIGKILL", 15: "SIGTERM"}
MOVES_ON = frozenset({"oom", "start"})


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended, all its nodes together: a state of workers.messages.OUTCOMES, `lost` past its lease.

    `failure` is the kind of the first failure (one of workers.messages.FAILURES) or "", `message` its text.
    `exit_codes` are by rank, negative for a signal.
    """

    state: str
    candidate: int = 0
    failure: str = ""
    message: str = ""
    exit_codes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The event to write, and what its data says: see orchestrator/core/fold.py."""

    event: str
    reason: str
    restarts: int
    interruptions: int
    first_candidate: int
    not_before_s: float
    refusals: int = 0


def after(job: Job, ended: Ended, now_s: float) -> Decision:
    """`job` as before the attempt ended, and not cancelled: then `released` is all there is to write."""
    if ended.state == "succeeded":
        return Decision("finished", "every rank ended with exit code 0", *_counts(job), job.first_candidate, 0.0)
    if ended.failure == "unreadable":
        return _restarted(job, ended, now_s)
    if ended.failure == "launch":
        return _refused(job, ended, now_s)
    if ended.state == "preempted" or (job.state is State.SAVING and _killed(ended)):
        asked = job.state is State.SAVING
        cause = "made room for a job of higher priority" if asked else "was stopped together with its node"
        return _interrupted(job, ended, now_s, cause, moves_on=False, pause=False)
    if ended.state != "failed":
        return _interrupted(job, ended, now_s, ended.message or f"the attempt was {ended.state}", moves_on=True)
    if ended.failure != "oom" and _killed(ended):
        return _interrupted(job, ended, now_s, f"a rank was killed by {_killer(ended)} from outside", moves_on=True)
    if codes := sorted({code for code in ended.exit_codes if code in job.recovery.retry_exit_codes}):
        told = ", ".join(str(code) for code in codes)
        return _interrupted(job, ended, now_s, f"exit code {told} is to be retried", moves_on=False)
    return _restarted(job, ended, now_s)


def _refused(job: Job, ended: Ended, now_s: float) -> Decision:
    """Neither the job's fault nor work that was lost: it waits again, longer each time, and spends nothing."""
    times = job.refusals + 1
    reason = f"could not be started{f' {times} times in a row' if times > 1 else ''}: {ended.message}"
    paused_until_s = now_s + backoff_s(job, times)
    return Decision("interrupted", reason, *_counts(job), ended.candidate + 1, paused_until_s, times)


def _interrupted(job: Job, ended: Ended, now_s: float, cause: str, *, moves_on: bool, pause: bool = True) -> Decision:
    used, limit = job.interruptions, job.recovery.max_interruptions
    if 0 <= limit <= used:
        return _gave_up(job, f"{cause}; all {limit} interruptions are used up", "recovery.max_interruptions")
    first = ended.candidate + 1 if moves_on else job.first_candidate
    not_before_s = now_s + backoff_s(job, used + 1) if pause else now_s
    return Decision("interrupted", cause, job.restarts, used + 1, first, not_before_s)


def _restarted(job: Job, ended: Ended, now_s: float) -> Decision:
    used, limit = job.restarts, job.recovery.max_restarts
    cause = ended.message or f"exit codes {', '.join(str(code) for code in ended.exit_codes)}"
    if 0 <= limit <= used:
        also = f" (after {used} of {limit} restarts)" if limit else ""
        return _gave_up(job, f"{cause}{also}", "recovery.max_restarts" if limit else "")
    first = ended.candidate + 1 if ended.failure in MOVES_ON else job.first_candidate
    reason = f"restart {used + 1}{f' of {limit}' if limit > 0 else ''}: {cause}"
    return Decision("interrupted", reason, used + 1, job.interruptions, first, now_s + backoff_s(job, used + 1))


def backoff_s(job: Job, times: int) -> float:
    """1, 2, 4, … times the job's own first pause, at most MAX_BACKOFF_S."""
    return min(MAX_BACKOFF_S, job.recovery.backoff_s * 2.0 ** min(times - 1, 32))


def _gave_up(job: Job, reason: str, setting: str) -> Decision:
    told = f"{reason}; raise {setting} to go on longer" if setting else reason
    return Decision("failed", told, *_counts(job), job.first_candidate, 0.0)


def _counts(job: Job) -> tuple[int, int]:
    return job.restarts, job.interruptions


def _killed(ended: Ended) -> bool:
    """By a signal that programs do not send themselves: the first rank to fail, or every rank that did not end well.

    When one rank is killed the others often fail too, of a broken connection.
    """
    signals = [_signal(code) for code in ended.exit_codes if code]
    outside = [number for number in signals if number in FROM_OUTSIDE]
    crashed = [number for number in signals if number and number not in FROM_OUTSIDE]
    return bool(outside) and (outside == signals or (ended.failure == "signal" and not crashed))


def _killer(ended: Ended) -> str:
    return next(FROM_OUTSIDE[_signal(code)] for code in ended.exit_codes if _signal(code) in FROM_OUTSIDE)


def _signal(code: int) -> int:
    """The signal's number, 0 for an exit. A shell reports its child's signal as 128 + number."""
    return -code if code < 0 else code - 128 if code > 128 else 0
