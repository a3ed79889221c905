"""Explain the next plan for a hypothetical fleet: `explain JOB --if '+4 amd:MI300X'`. Pure.

The planner runs twice: with the present fleet and with the changed one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cluster import catalogue
from cluster.errors import SpecError, UserError, nearest
from orchestrator.core.explanation.explain import Explanation, explain
from orchestrator.core.model import Devices, Job, Plan, Running, Snapshot
from orchestrator.core.plan.plan import plan
from orchestrator.core.states import State

FIELD = "if"
FORMS = "write '+4 nvidia:H100-80GB', '+4 cpu pool NAME', 'pool NAME down' or 'node NAME up'"
MAX_DEVICES = 10_000
NEW_NODE_PREFIX = "new-"


@dataclass(frozen=True, slots=True)
class Change:
    """Change of the fleet: new devices, or a pool or node that becomes available or unavailable.

    `count` new devices of kind `name` in `pool` ("": in a pool that has this kind), or a `subject` ("pool" or "node")
    called `name` that is `up` or not.
    """

    subject: str
    name: str
    count: int = 0
    up: bool = False
    pool: str = ""

    @property
    def sentence(self) -> str:
        if self.count:
            return f"{self.count} more {self.name} on one node{f' of pool {self.pool}' if self.pool else ''}"
        return f"{self.subject} {self.name} is {'up' if self.up else 'down'}"


@dataclass(frozen=True, slots=True)
class OtherJob:
    """Another job, and what would change for it."""

    job: str
    then: str


@dataclass(frozen=True, slots=True)
class WhatIf:
    """`explanation` of the job in the changed fleet; `others` are the jobs for which anything would change."""

    changes: tuple[str, ...]
    explanation: Explanation
    others: tuple[OtherJob, ...]


def what_if(job: Job, snapshot: Snapshot, texts: Iterable[str], running: Mapping[str, Job]) -> WhatIf:
    """Explain `job` in the changed fleet. `running` are the jobs of live attempts.

    Raises SpecError for a text that does not describe a change of this fleet.
    """
    changes = [parse(text, snapshot) for text in texts]
    changed, stopped = snapshot, frozenset[str]()
    for change in changes:
        changed, newly_stopped = _changed(changed, change, running)
        stopped |= newly_stopped
    before, after = plan(_without(snapshot, job.id)), plan(_without(changed, job.id))
    others = _others(before, after, stopped, job.id)
    return WhatIf(tuple(change.sentence for change in changes), explain(job, changed), tuple(others))


def parse(text: str, snapshot: Snapshot) -> Change:
    """Parse one change. Raises SpecError that names the nearest valid kind, pool or node."""
    parts = text.split()
    if parts and parts[0].startswith("+") and (len(parts) == 2 or (len(parts) == 4 and parts[2] == "pool")):
        pool = _existing_name("pool", parts[3], snapshot) if parts[2:] else ""
        return Change("kind", _kind(parts[1], snapshot), _count(parts[0][1:], text), pool=pool)
    if len(parts) == 3 and parts[0] in ("pool", "node") and parts[2] in ("down", "up"):
        return Change(parts[0], _existing_name(parts[0], parts[1], snapshot), up=parts[2] == "up")
    raise SpecError(FIELD, f"{text!r} is not a change of a fleet", FORMS)


def _existing_name(subject: str, name: str, snapshot: Snapshot) -> str:
    names = sorted({have.pool if subject == "pool" else have.node for have in snapshot.devices})
    if name not in names:
        raise SpecError(FIELD, f"no {subject} is called {name!r}", nearest(name, names))
    return name


def _count(digits: str, text: str) -> int:
    if digits.isascii() and digits.isdecimal() and len(digits) < 10 and 0 < int(digits) <= MAX_DEVICES:
        return int(digits)
    raise SpecError(FIELD, f"{text!r} has no number from 1 to {MAX_DEVICES} after the +", FORMS)


def _kind(text: str, snapshot: Snapshot) -> str:
    """Return the kind that `text` means: one in this fleet if possible, else one of the catalogue."""
    try:
        kind = catalogue.resolve_kind(text)
    except UserError as e:
        raise SpecError(FIELD, e.message, e.remedy) from None
    if matching := sorted({have.kind for have in snapshot.possible if catalogue.matches_pattern(kind, have.kind)}):
        return matching[0]
    if catalogue.model(kind) is not None:
        return kind
    examples = ", ".join(row.kind for row in catalogue.same_family(kind)[:4])
    raise SpecError(FIELD, f"{text} is not one kind of device", f"write one, e.g. {examples or 'nvidia:H100-80GB'}")


def _changed(snapshot: Snapshot, change: Change, running: Mapping[str, Job]) -> tuple[Snapshot, frozenset[str]]:
    """Return the fleet after a change, and the jobs whose attempts it stops; these then wait like other jobs."""
    if change.count:
        return replace(snapshot, devices=(*snapshot.devices, _new(change, snapshot))), frozenset()
    affected = {
        have.id for have in snapshot.devices if change.name == (have.pool if change.subject == "pool" else have.node)
    }
    devices = tuple(_up(have, change.up) if have.id in affected else have for have in snapshot.devices)
    if change.up:
        return replace(snapshot, devices=devices), frozenset()
    lost_attempts = [r for r in snapshot.running if any(devices_id in affected for devices_id, _ in r.allocation)]
    freed = tuple(_freed(have, lost_attempts) for have in devices)
    stopped = frozenset(attempt.job for attempt in lost_attempts)
    requeued = tuple(replace(running[job], state=State.PENDING) for job in sorted(stopped) if job in running)
    remaining = tuple(attempt for attempt in snapshot.running if attempt.job not in stopped)
    return replace(snapshot, devices=freed, jobs=(*snapshot.jobs, *requeued), running=remaining), stopped


def _new(change: Change, snapshot: Snapshot) -> Devices:
    number = sum(have.node.startswith(NEW_NODE_PREFIX) for have in snapshot.devices) + 1
    node, free = f"{NEW_NODE_PREFIX}{number}", tuple(range(change.count))
    alike = next(
        (have for have in snapshot.possible if have.kind == change.name and change.pool in ("", have.pool)), None
    )
    if alike is not None:
        devices = replace(alike, id=f"{node}/{change.name}", node=node, free=free, total=change.count)
        return replace(devices, schedulable=True, reason="", data=())
    backend, memory_bytes = change.name.partition(":")[0], _memory_bytes(change.name)
    return Devices(
        f"{node}/{change.name}",
        node,
        change.pool or "new",
        "",
        backend,
        change.name,
        free,
        change.count,
        memory_bytes=memory_bytes,
    )


def _memory_bytes(kind: str) -> int:
    """Return the published memory of one device in bytes, 0 if unknown."""
    model = catalogue.model(kind)
    if model is None:
        return 0
    card_bytes = (model.memory_gib or 0) * 2**30 or (model.memory_gb or 0) * 1e9
    return int(card_bytes / model.devices_per_card)


def _up(have: Devices, up: bool) -> Devices:
    return replace(have, schedulable=up, reason="" if up else f"{have.node} would be down")


def _freed(have: Devices, lost: Iterable[Running]) -> Devices:
    """Return the devices with those that stopped attempts held added to `free`."""
    numbers = {
        n
        for attempt in lost
        for devices_id, allocated in attempt.allocation
        if devices_id == have.id
        for n in allocated
    }
    return replace(have, free=tuple(sorted({*have.free, *numbers}))) if numbers else have


def _without(snapshot: Snapshot, job: str) -> Snapshot:
    return replace(snapshot, jobs=tuple(other for other in snapshot.jobs if other.id != job))


def _others(before: Plan, after: Plan, stopped: frozenset[str], explained: str) -> Iterable[OtherJob]:
    starts_on, would_start_on = _where(before), _where(after)
    for job in sorted({*starts_on, *would_start_on, *stopped} - {explained}):
        if job in stopped:
            yield OtherJob(
                job, f"would stop, and {f'start again on {would_start_on[job]}' if job in would_start_on else 'wait'}"
            )
        elif starts_on.get(job) != would_start_on.get(job):
            yield OtherJob(
                job, f"would start on {would_start_on[job]}" if job in would_start_on else "would no longer start now"
            )


def _where(planned: Plan) -> dict[str, str]:
    return {start.job: ", ".join(devices_id for devices_id, _ in start.allocation) for start in planned.start}
