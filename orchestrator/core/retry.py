"""What follows when an attempt has ended: a pure table of causes, budgets and pauses.

| how it ended                                            | counts as    | next candidate | pause   |
|---------------------------------------------------------|--------------|----------------|---------|
| succeeded                                               |              |                |         |
| preempted, or killed while it was asked to stop         | interruption | unchanged      | none    |
| `lost`: its node or agent; a rank killed from outside   | interruption | the next one   | growing |
| exit code in `retry_exit_codes`                         | interruption | unchanged      | growing |
| `launch`: no rank was started                           | nothing      | unchanged      | growing |
| `oom`, `storage`, `start`: this place was too small     | restart      | the next one   | growing |
| `user`, `hang`, `unreadable`, a crash by its own signal | restart      | unchanged      | growing |
| `nan`: a loss or a metric was no finite number          | the end      |                |         |
| `user` before it was started: a secret is not set, …    | the end      |                |         |

`recovery.on_events` replaces the row of a failure's kind: `restart` and `next` (a restart on the next candidate) count
against `max_restarts`, `retry` against `max_interruptions`, `fail` ends the job.

"Killed from outside" is SIGKILL, SIGTERM, SIGINT or SIGHUP that we did not send; the kernel's OOM killer is known by
the supervisor and comes as `oom`. A pause doubles with each restart or interruption, from `backoff_s` to MAX_BACKOFF_S.
That of a lost node counts from its fence: the lease that had to pass since then was a pause too. The nodes of an
attempt that ended badly are tried last.
"""

from dataclasses import dataclass

from orchestrator.core.model import Job
from orchestrator.core.states import State

MAX_BACKOFF_S = 60.0
FROM_OUTSIDE = {1: "SIGHUP", 2: "SIGINT", 9: "SIGKILL", 15: "SIGTERM"}
ACTIONS = {"lost": "retry", "oom": "next", "storage": "next", "start": "next", "nan": "fail"}
"""By kind of failure; `restart` for all others."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended, all its nodes together: a state of workers.messages.OUTCOMES, `lost` past its lease.

    `failure` is the kind of the first failure (one of workers.messages.FAILURES) or "", `message` its text.
    `exit_codes` are by rank, negative for a signal. `nodes` are those where it failed; `asked` is why it was asked to
    stop, "" if it was not. `refused`: what its user got wrong kept it from being started.
    """

    state: str
    candidate: int = 0
    failure: str = ""
    message: str = ""
    exit_codes: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    asked: str = ""
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The event to write, and what its data says: see orchestrator/core/fold.py."""

    event: str
    reason: str
    restarts: int
    interruptions: int
    first_candidate: int
    pause_s: float = 0.0
    refusals: int = 0
    avoid: tuple[str, ...] = ()


def after(job: Job, ended: Ended) -> Decision:
    """`job` as before the attempt ended, and not cancelled: then `released` is all there is to write."""
    if ended.state == "succeeded":
        return Decision("finished", "every rank ended with exit code 0", *_counts(job), job.first_candidate)
    if ended.refused:
        return _gave_up(job, _cause(ended), "")
    if ended.failure == "launch":
        return _refused(job, ended)
    if ended.state == "preempted" or (job.state is State.SAVING and _killed(ended)):
        cause = ended.asked or "its node stopped it"
        told = f"{cause}; {ended.message}" if ended.state == "preempted" and ended.message else cause
        return _interrupted(job, ended, told, moves_on=False, pause=False)
    return _failed(job, ended)


def _failed(job: Job, ended: Ended) -> Decision:
    if job.recovery.on_disconnect == "stop" and ended.failure == "lost":
        return _gave_up(job, f"{ended.message}; recovery.on_disconnect is stop", "")
    action = job.recovery.on_events.get(_kind(ended), "")
    if action == "fail":
        return _gave_up(job, f"{ended.message}; recovery.on_events says fail for {_kind(ended)}", "")
    retried = not action and ended.failure != "unreadable"  # ranks are killed for that, with any exit code
    if retried and (codes := sorted({c for c in ended.exit_codes if c in job.recovery.retry_exit_codes})):
        told = ", ".join(str(code) for code in codes)
        return _interrupted(job, ended, f"exit code {told} is to be retried", moves_on=False)
    action = action or ACTIONS.get(_kind(ended), "restart")
    if action == "fail":
        return _gave_up(job, ended.message, "recovery.on_events (nan: restart)" if ended.failure == "nan" else "")
    if action == "retry":
        killed = _kind(ended) == "lost" and ended.failure != "lost" and _killed(ended)
        cause = f"a rank was killed by {_killer(ended)} from outside" if killed else _cause(ended)
        return _interrupted(job, ended, cause, moves_on=True)
    return _restarted(job, ended, moves_on=action == "next")


def _kind(ended: Ended) -> str:
    """The failure's kind; what stopped a rank from outside, or an attempt without a word, is `lost`."""
    untold = ended.state != "failed" and ended.failure not in ("oom", "storage", "unreadable")
    return "lost" if untold or _killed(ended) else ended.failure


def _refused(job: Job, ended: Ended) -> Decision:
    """Neither the job's fault nor work that was lost: it waits again, longer each time, and spends nothing."""
    times = job.refusals + 1
    reason = f"could not be started{f' {times} times in a row' if times > 1 else ''}: {ended.message}"
    pause_s = backoff_s(job, times)
    return Decision("interrupted", reason, *_counts(job), job.first_candidate, pause_s, times, ended.nodes)


def _interrupted(job: Job, ended: Ended, cause: str, *, moves_on: bool, pause: bool = True) -> Decision:
    used, limit = job.interruptions, job.recovery.max_interruptions
    if 0 <= limit <= used:
        return _gave_up(job, f"{cause}; all {limit} interruptions are used up", "recovery.max_interruptions")
    first = ended.candidate + 1 if moves_on else job.first_candidate
    pause_s = backoff_s(job, used + 1) if pause else 0.0
    avoid = ended.nodes if moves_on else ()
    return Decision("interrupted", cause, job.restarts, used + 1, first, pause_s, avoid=avoid)


def _restarted(job: Job, ended: Ended, *, moves_on: bool) -> Decision:
    used, limit = job.restarts, job.recovery.max_restarts
    cause = _cause(ended)
    if 0 <= limit <= used:
        also = f" (after {used} of {limit} restarts)" if limit else ""
        return _gave_up(job, f"{cause}{also}", "recovery.max_restarts" if limit else "")
    first = ended.candidate + 1 if moves_on else job.first_candidate
    reason = f"restart {used + 1}{f' of {limit}' if limit > 0 else ''}: {cause}"
    avoid = ended.nodes if moves_on else ()
    return Decision("interrupted", reason, used + 1, job.interruptions, first, backoff_s(job, used + 1), avoid=avoid)


def backoff_s(job: Job, times: int) -> float:
    """1, 2, 4, … times the job's own first pause, at most MAX_BACKOFF_S."""
    return min(MAX_BACKOFF_S, job.recovery.backoff_s * 2.0 ** min(times - 1, 32))


def _cause(ended: Ended) -> str:
    if ended.message:
        return ended.message
    codes = ", ".join(str(code) for code in ended.exit_codes)
    return f"exit codes {codes}" if codes else f"the attempt was {ended.state}"


def _gave_up(job: Job, reason: str, setting: str) -> Decision:
    told = f"{reason}; change {setting} to go on" if setting else reason
    return Decision("failed", told, *_counts(job), job.first_candidate)


def _counts(job: Job) -> tuple[int, int]:
    return job.restarts, job.interruptions


def _killed(ended: Ended) -> bool:
    """By a signal that programs do not send themselves: the first rank to fail, or every rank that did not end well.

    When one rank is killed the others often fail too, of a broken connection.
    """
    if ended.failure in ("oom", "storage", "nan", "hang", "unreadable"):
        return False
    signals = [_signal(code) for code in ended.exit_codes if code]
    outside = [number for number in signals if number in FROM_OUTSIDE]
    crashed = [number for number in signals if number and number not in FROM_OUTSIDE]
    return bool(outside) and (outside == signals or (ended.failure == "signal" and not crashed))


def _killer(ended: Ended) -> str:
    return next(FROM_OUTSIDE[_signal(code)] for code in ended.exit_codes if _signal(code) in FROM_OUTSIDE)


def _signal(code: int) -> int:
    """The signal's number, 0 for an exit. A shell reports its child's signal as 128 + number."""
    return -code if code < 0 else code - 128 if code > 128 else 0
