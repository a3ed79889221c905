"""What the next plan would say of a fleet that is not quite this one: `explain JOB --if '+4 amd:MI300X'`. Pure.

The planner itself is asked twice, of the fleet as it is and of the fleet as it would be.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cluster import catalogue
from cluster.errors import SpecError, UserError, nearest
from orchestrator.core.explain import Explanation, explain
from orchestrator.core.model import Devices, Job, Plan, Running, Snapshot
from orchestrator.core.plan import plan
from orchestrator.core.states import State

FIELD = "if"
FORMS = "write '+4 nvidia:H100-80GB', '+4 cpu pool NAME', 'pool NAME down' or 'node NAME up'"
MOST_DEVICES = 10_000
NEW = "new-"


@dataclass(frozen=True, slots=True)
class Change:
    """`count` new devices of kind `name`, in `pool` or, for "", where that kind is; or a `subject` (pool, node) called
    `name` that is `up` or not.
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
class Other:
    """A job beside the one asked about, and what would be different for it."""

    job: str
    then: str


@dataclass(frozen=True, slots=True)
class WhatIf:
    """`explanation` is of the job in the fleet as it would be; `others` are those for which anything would change."""

    changes: tuple[str, ...]
    explanation: Explanation
    others: tuple[Other, ...]


def what_if(job: Job, seen: Snapshot, texts: Iterable[str], running: Mapping[str, Job]) -> WhatIf:
    """`running` are the jobs of live attempts. Raises SpecError for a text that says no change of this fleet."""
    changes = [parse(text, seen) for text in texts]
    then, stopped = seen, frozenset[str]()
    for change in changes:
        then, lost = _changed(then, change, running)
        stopped |= lost
    before, after = plan(_without(seen, job.id)), plan(_without(then, job.id))
    others = _others(before, after, stopped, job.id)
    return WhatIf(tuple(change.sentence for change in changes), explain(job, then), tuple(others))


def parse(text: str, seen: Snapshot) -> Change:
    """Raises SpecError that names the nearest valid kind, pool or node."""
    words = text.split()
    if words and words[0].startswith("+") and (len(words) == 2 or (len(words) == 4 and words[2] == "pool")):
        pool = _known("pool", words[3], seen) if words[2:] else ""
        return Change("kind", _kind(words[1], seen), _count(words[0][1:], text), pool=pool)
    if len(words) == 3 and words[0] in ("pool", "node") and words[2] in ("down", "up"):
        return Change(words[0], _known(words[0], words[1], seen), up=words[2] == "up")
    raise SpecError(FIELD, f"{text!r} is not a change of a fleet", FORMS)


def _known(subject: str, name: str, seen: Snapshot) -> str:
    known = sorted({have.pool if subject == "pool" else have.node for have in seen.devices})
    if name not in known:
        raise SpecError(FIELD, f"no {subject} is called {name!r}", nearest(name, known))
    return name


def _count(digits: str, text: str) -> int:
    if digits.isascii() and digits.isdecimal() and len(digits) < 10 and 0 < int(digits) <= MOST_DEVICES:
        return int(digits)
    raise SpecError(FIELD, f"{text!r} has no number from 1 to {MOST_DEVICES} after the +", FORMS)


def _kind(word: str, seen: Snapshot) -> str:
    """One that is here, where the word means it; else one of the catalogue's."""
    try:
        known = catalogue.require_known_kind(word)
    except UserError as e:
        raise SpecError(FIELD, e.message, e.remedy) from None
    if here := sorted({have.kind for have in seen.possible if catalogue.matches_pattern(known, have.kind)}):
        return here[0]
    if catalogue.model(known) is not None:
        return known
    several = ", ".join(row.kind for row in catalogue.same_family(known)[:4])
    raise SpecError(FIELD, f"{word} is not one kind of device", f"write one, e.g. {several or 'nvidia:H100-80GB'}")


def _changed(seen: Snapshot, change: Change, running: Mapping[str, Job]) -> tuple[Snapshot, frozenset[str]]:
    """The fleet as it would be, and the jobs whose attempts that stops: they wait then like others."""
    if change.count:
        return replace(seen, devices=(*seen.devices, _new(change, seen))), frozenset()
    meant = {have.id for have in seen.devices if change.name == (have.pool if change.subject == "pool" else have.node)}
    devices = tuple(_up(have, change.up) if have.id in meant else have for have in seen.devices)
    if change.up:
        return replace(seen, devices=devices), frozenset()
    lost = [r for r in seen.running if any(devices_id in meant for devices_id, _ in r.leases)]
    freed = tuple(_given_back(have, lost) for have in devices)
    stopped = frozenset(attempt.job for attempt in lost)
    again = tuple(replace(running[job], state=State.PENDING) for job in sorted(stopped) if job in running)
    left = tuple(attempt for attempt in seen.running if attempt.job not in stopped)
    return replace(seen, devices=freed, jobs=(*seen.jobs, *again), running=left), stopped


def _new(change: Change, seen: Snapshot) -> Devices:
    number = sum(have.node.startswith(NEW) for have in seen.devices) + 1
    node, free = f"{NEW}{number}", tuple(range(change.count))
    alike = next((have for have in seen.possible if have.kind == change.name and change.pool in ("", have.pool)), None)
    if alike is not None:
        place = replace(alike, id=f"{node}/{change.name}", node=node, free=free, total=change.count)
        return replace(place, schedulable=True, reason="", data=())
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
    """Of one device, as published; 0 where that is not known."""
    model = catalogue.model(kind)
    if model is None:
        return 0
    card_bytes = (model.memory_gib or 0) * 2**30 or (model.memory_gb or 0) * 1e9
    return int(card_bytes / model.devices_per_card)


def _up(have: Devices, up: bool) -> Devices:
    return replace(have, schedulable=up, reason="" if up else f"{have.node} would be down")


def _given_back(have: Devices, lost: Iterable[Running]) -> Devices:
    """What attempts that stop held elsewhere is free."""
    numbers = {n for attempt in lost for devices_id, held in attempt.leases if devices_id == have.id for n in held}
    return replace(have, free=tuple(sorted({*have.free, *numbers}))) if numbers else have


def _without(seen: Snapshot, job: str) -> Snapshot:
    return replace(seen, jobs=tuple(other for other in seen.jobs if other.id != job))


def _others(before: Plan, after: Plan, stopped: frozenset[str], asked: str) -> Iterable[Other]:
    now_on, then_on = _where(before), _where(after)
    for job in sorted({*now_on, *then_on, *stopped} - {asked}):
        if job in stopped:
            yield Other(job, f"would stop, and {f'start again on {then_on[job]}' if job in then_on else 'wait'}")
        elif now_on.get(job) != then_on.get(job):
            yield Other(job, f"would start on {then_on[job]}" if job in then_on else "would no longer start now")


def _where(decided: Plan) -> dict[str, str]:
    return {start.job: ", ".join(devices_id for devices_id, _ in start.leases) for start in decided.start}
