"""Progress of open jobs from the reports of their rank 0: newest step, steps per second, device-seconds. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.core.jobs.fold import Attempt, Record
from orchestrator.core.model import Progress

if TYPE_CHECKING:
    from orchestrator.core.controller.attempts import LiveAttempt
    from orchestrator.core.controller.draft import Draft

HALF_LIFE_S = 60.0
"""Seconds after which the weight of a report in the mean rate is halved."""

MAX_CLOCK_GAIN_S = 60.0
"""Seconds that a rank's clock may gain on ours since its first report; beyond that the clock was changed."""

Data = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pace:
    """Measured rate of a live attempt.

    `step` was reported at `t`, the rank's wall clock. `first_t` (same clock) and `first_s` (monotonic) are the times of
    the first report measured. `warm`: the first interval, which contains compilation, has ended. The rate is `steps`
    divided by `seconds`, two sums over `samples` intervals, in which older ones weigh less.
    """

    step: int
    t: float
    first_t: float
    first_s: float
    warm: bool = False
    steps: float = 0.0
    seconds: float = 0.0
    samples: int = 0

    def reported(self, step: int, t: float, now_s: float) -> "Pace":
        """Return the pace after one more report. Measuring restarts if step or clock go back, or a clock was set."""
        took_s, made = t - self.t, step - self.step
        if made < 0 or took_s < 0 or (t - self.first_t) - (now_s - self.first_s) > MAX_CLOCK_GAIN_S:
            return Pace(step, t, t, now_s)
        if not (made and took_s):
            return self  # counted with the next report
        if not self.warm:
            return replace(self, step=step, t=t, warm=True)
        weight = 0.5 ** (took_s / HALF_LIFE_S)
        sums = self.steps * weight + made, self.seconds * weight + took_s
        return replace(self, step=step, t=t, steps=sums[0], seconds=sums[1], samples=self.samples + 1)

    @property
    def rate(self) -> float | None:
        return self.steps / self.seconds if self.seconds > 0 else None


def apply_report(draft: "Draft", live_attempt: "LiveAttempt", t: float, data: Data) -> Pace | None:
    """Update the job's progress from a report of rank 0 at its wall clock `t`. Return the attempt's new pace."""
    record, now_s = draft.records[live_attempt.job], draft.now.s
    attempt, step = record.live_attempt, data.get("step")
    if attempt is None or type(step) is not int:
        return live_attempt.pace
    progress = draft.progress.get(live_attempt.job) or Progress()
    pace = live_attempt.pace.reported(step, t, now_s) if live_attempt.pace else Pace(step, t, t, now_s)
    rates = progress.rates
    if (rate := pace.rate) is not None:
        rates = {**rates, (attempt.kind, devices_of(attempt)): rate}
    starts_s = progress.starts_s
    if live_attempt.pace is None and not live_attempt.last_event_at:
        starts_s = _starts_s(attempt, t, draft.now.wall_s)
    of = _total(data, step) or (progress.of if progress.of >= step else 0)
    draft.progress[live_attempt.job] = replace(progress, step=step, of=of, at_s=now_s, rates=rates, starts_s=starts_s)
    return pace


def attempt_ended(draft: "Draft", job: str, stop_took_s: float | None = None) -> None:
    """Set the job's progress to its checkpoint after an attempt has ended, since a next attempt resumes there.

    `stop_took_s`: seconds from the request to save and stop to its end, None if it ended otherwise.
    """
    record = draft.records.get(job)
    if record is not None:
        progress = draft.progress.get(job) or Progress()
        stops_s = progress.stops_s if stop_took_s is None else stop_took_s + _lost_s(record, progress)
        device_seconds = device_seconds_by_kind(record.attempts)
        draft.progress[job] = replace(
            progress,
            step=resume_step(record),
            ran_on=device_seconds,
            ran_s=sum(device_seconds.values()),
            stops_s=stops_s,
        )


def _lost_s(record: Record, progress: Progress) -> float:
    """Return the seconds of progress since the newest checkpoint, at the rate of the last attempt; 0 if unknown."""
    last = record.attempts[-1]
    rate = progress.rates.get((last.kind, devices_of(last)), 0.0)
    return max(0, progress.step - resume_step(record)) / rate if rate else 0.0


def progress_of(record: Record, newest: Data, now_s: float) -> Progress:
    """Return a job's progress after a start of the server. `newest` is its last report, or {}. Rates are not stored."""
    step, device_seconds = newest.get("step"), device_seconds_by_kind(record.attempts)
    if record.live_attempt is None or type(step) is not int or step < 0:
        step = resume_step(record)
    of = _total(newest, step)
    return Progress(step, of, now_s, ran_on=device_seconds, ran_s=sum(device_seconds.values()))


def resume_step(record: Record) -> int:
    """Return the step at which a next attempt would resume."""
    step = record.checkpoint.get("step") if record.checkpoint else record.resumed_step
    return step if type(step) is int and step > 0 else 0


def device_seconds_by_kind(attempts: Iterable[Attempt], wall_s: float | None = None) -> dict[str, float]:
    """Return device-seconds by kind of ended attempts, and of a live one until `wall_s` unless that is None."""
    by_kind: dict[str, float] = {}
    for attempt in attempts:
        until_s = wall_s if attempt.ended_s is None else attempt.ended_s
        if attempt.started_s is not None and until_s is not None and until_s > attempt.started_s:
            seconds = (until_s - attempt.started_s) * devices_of(attempt)
            by_kind[attempt.kind] = by_kind.get(attempt.kind, 0.0) + seconds
    return by_kind


def devices_of(attempt: Attempt) -> int:
    """Return the number of devices on all nodes of an attempt."""
    return sum(len(numbers) for _, numbers in attempt.allocation)


def _total(data: Data, step: int) -> int:
    """Return the total number of steps, 0 if not reported. A user metric may be named `of` too, so check its value."""
    of = data.get("of")
    return of if type(of) is int and of >= max(step, 1) else 0


def _starts_s(attempt: Attempt, t: float, wall_s: float) -> float:
    """Return the seconds from placement to the first report.

    The rank's clock is used where it agrees with ours, because a report may arrive late.
    """
    reported_s = t if attempt.placed_s <= t <= wall_s else wall_s
    return max(0.0, reported_s - attempt.placed_s)
