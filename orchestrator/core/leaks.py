"""Devices that are held for nobody, for `doctor`. The controller gives back by itself what it can. Pure."""

from dataclasses import dataclass

from orchestrator.core.attempts import MARGIN_S
from orchestrator.core.draft import Control
from orchestrator.core.messages import Now
from orchestrator.core.states import TERMINAL

SOON_S = 10.0
"""What ends in the ordinary way has been put away by then."""


@dataclass(frozen=True, slots=True)
class Leak:
    """What holds devices that it should not (an attempt, or a reservation), and why that is known."""

    attempt: str
    reason: str


def found(control: Control, now: Now) -> list[Leak]:
    return [*_of_ended_jobs(control, now), *_not_released(control, now)]


def _of_ended_jobs(control: Control, now: Now) -> list[Leak]:
    """Jobs that ended while their attempt still has devices: past its lease it has no right to run."""
    leaks = []
    for live in control.lives.values():
        record = control.records[live.job]
        job, asked = record.job, [a.at_s for a in live.asked.values() if a.how == "cancel"]
        kept_s = now.s - min(asked, default=now.s if live.cancelled_s is None else live.cancelled_s)
        if job.state in TERMINAL and kept_s > job.recovery.lease_s + MARGIN_S + SOON_S:
            devices = ", ".join(f"{part.devices_id} {list(part.numbers)}" for part in live.parts)
            since = f"cancelled {kept_s:.0f} s ago; its launch has not ended"
            if not live.launching:
                since = f"asked to stop {kept_s:.0f} s ago"
            leaks.append(Leak(live.key, f"the job is {job.state}, and its attempt still holds {devices}, {since}"))
    return leaks


def _not_released(control: Control, now: Now) -> list[Leak]:
    late = [(place, kept) for place, kept in control.releasing.items() if now.s - kept.since_s > SOON_S]
    return [Leak(kept.attempt, f"Ray has kept its reservation for {now.s - kept.since_s:.0f} s") for _, kept in late]
