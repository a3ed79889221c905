"""How far open jobs are, from what their rank 0 reports: newest step, steps per second, device-seconds so far. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.core.fold import Attempt, Record
from orchestrator.core.model import Progress

if TYPE_CHECKING:
    from orchestrator.core.attempts import Live
    from orchestrator.core.draft import Draft

HALF_LIFE_S = 60.0
"""Of a report's weight in the mean rate: after so long it counts for half."""

AHEAD_S = 60.0
"""A rank's clock that has run so far ahead of ours since its first report was set meanwhile."""

Data = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pace:
    """How the rate of a live attempt is measured. `step` was reported at `t`, the rank's wall clock; `first_t` and
    `first_s` (monotonic) are of the report that measuring began with. `warm`: the first interval, which holds
    compilation, is over. `steps` over `seconds` is the rate: sums in which older intervals weigh less.
    """

    step: int
    t: float
    first_t: float
    first_s: float
    warm: bool = False
    steps: float = 0.0
    seconds: float = 0.0

    def reported(self, step: int, t: float, now_s: float) -> "Pace":
        """After one more report. Measuring begins anew where steps or clocks go back, or a clock was set."""
        took_s, made = t - self.t, step - self.step
        if made < 0 or took_s < 0 or (t - self.first_t) - (now_s - self.first_s) > AHEAD_S:
            return Pace(step, t, t, now_s)
        if not (made and took_s):
            return self  # counted with the next
        if not self.warm:
            return replace(self, step=step, t=t, warm=True)
        kept = 0.5 ** (took_s / HALF_LIFE_S)
        sums = self.steps * kept + made, self.seconds * kept + took_s
        return replace(self, step=step, t=t, steps=sums[0], seconds=sums[1])

    @property
    def rate(self) -> float | None:
        return self.steps / self.seconds if self.seconds > 0 else None


def reported(draft: "Draft", live: "Live", t: float, data: Data) -> Pace | None:
    """Of a report of rank 0 at its wall clock `t`: the job's progress is updated. The attempt's pace from now on."""
    record, now_s = draft.records[live.job], draft.now.s
    attempt, step = record.live, data.get("step")
    if attempt is None or type(step) is not int:
        return live.pace
    known = draft.progress.get(live.job) or Progress()
    pace = live.pace.reported(step, t, now_s) if live.pace else Pace(step, t, t, now_s)
    rates = known.rates
    if (rate := pace.rate) is not None:
        rates = {**rates, (attempt.kind, devices_of(attempt)): rate}
    starts_s = known.starts_s
    if live.pace is None and not live.told_at:
        starts_s = _starts_s(attempt, t, draft.now.wall_s)
    of = _total(data, step) or (known.of if known.of >= step else 0)
    draft.progress[live.job] = replace(known, step=step, of=of, at_s=now_s, rates=rates, starts_s=starts_s)
    return pace


def ended(draft: "Draft", job: str) -> None:
    """An attempt of a job is over, and its job may go on: from its checkpoint."""
    record = draft.records.get(job)
    if record is not None:
        known = draft.progress.get(job) or Progress()
        ran = ran_on(record.attempts)
        draft.progress[job] = replace(known, step=resumes_at(record), ran_on=ran, ran_s=sum(ran.values()))


def of_record(record: Record, newest: Data, now_s: float) -> Progress:
    """After a start of the server; `newest` is what the job reported last, {} for nothing. Rates are not stored."""
    step, ran = newest.get("step"), ran_on(record.attempts)
    if record.live is None or type(step) is not int or step < 0:
        step = resumes_at(record)
    of = _total(newest, step)
    return Progress(step, of, now_s, ran_on=ran, ran_s=sum(ran.values()))


def resumes_at(record: Record) -> int:
    """The step from which a next attempt would go on."""
    step = record.checkpoint.get("step") if record.checkpoint else record.resumed_step
    return step if type(step) is int and step > 0 else 0


def ran_on(attempts: Iterable[Attempt], wall_s: float | None = None) -> dict[str, float]:
    """Device-seconds by kind of attempts that ended; of a live one up to `wall_s` where that is given."""
    found: dict[str, float] = {}
    for attempt in attempts:
        until_s = wall_s if attempt.ended_s is None else attempt.ended_s
        if attempt.started_s is not None and until_s is not None and until_s > attempt.started_s:
            seconds = (until_s - attempt.started_s) * devices_of(attempt)
            found[attempt.kind] = found.get(attempt.kind, 0.0) + seconds
    return found


def devices_of(attempt: Attempt) -> int:
    """On all its nodes."""
    return sum(len(numbers) for _, numbers in attempt.leases)


def _total(data: Data, step: int) -> int:
    """0 where it was not told. A metric of that name, from code that knew no `of`, may be anything."""
    of = data.get("of")
    return of if type(of) is int and of >= max(step, 1) else 0


def _starts_s(attempt: Attempt, t: float, wall_s: float) -> float:
    """By the rank's clock where it agrees with ours: a report may be heard late."""
    heard_s = t if attempt.placed_s <= t <= wall_s else wall_s
    return max(0.0, heard_s - attempt.placed_s)
