"""Nodes as the controller knows them, and what it may place on them. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cluster.types import Device, NodeFacts
from orchestrator.core.durations import told_s
from orchestrator.core.fold import Record
from orchestrator.core.model import Devices, Event
from orchestrator.core.timing import NODE_SILENT_S
from workers.messages import PROTOCOL

OWNER = "node/"
"""Events of a node stand in the log under this and its name; no job may be called so."""

EVENTS = ("drained", "undrained")

FAILURES = 3
WITHIN_S = 600.0
ONE_FAULT_S = 15.0
"""One fault is told by many: by Ray, by the agent's end, by each attempt that is lost; see `failed`."""

QUARANTINE_S = 600.0

RESTART_S = 30.0
"""A node that is started again is back within seconds, on a busy machine later."""

Leased = dict[str, dict[int, str]]


@dataclass(frozen=True, slots=True)
class Stranger:
    """An attempt that a node tells of and that is none of ours: how far it has told. `known`: of a job we have."""

    cursor: int
    phase: str
    known: bool
    asked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Withheld:
    """Ray reserves resources of a node for nobody: since when that is known, when a launch was last refused for it, and
    when the node was last to be started again. `closing`: launches there are waited for, and no more begin. Monotonic
    seconds.
    """

    since_s: float
    told_s: float
    restarted_s: float = float("-inf")
    closing: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """`heard_s` is of its newest answer, or of its appearance; `listed_s` of when it was asked for the newest list of
    its attempts, None before the first. `lost` is "" while Ray says it lives; `lost_s` is since when a lost one could
    have come back. `refused` is why it cannot be used at all (another protocol), `broken` why its agent cannot tell
    what runs there, `drains` what Ray says of its end. `same_as`: the name that it was given and that another living
    node bears. `failures`: the newest, as (when, what). `failing`: a failure was told since it was last heard.
    `withheld`: see core/leaked_devices.py. `cpus`: how many Ray gives out there, 0 where that is not known. `unmade`:
    how often in a row its agent could not be made or ended without a word. `resting_s`: when its agent was last ended
    since an autoscaler may take the node away, None while it is to have one. `taken_s`: when a launch was last refused
    since another user of the Ray cluster holds devices there. Monotonic seconds.
    """

    name: str
    ray_id: str
    heard_s: float
    facts: NodeFacts | None = None
    has_agent: bool = False
    making_s: float | None = None
    restarted_s: float = 0.0
    listed_s: float | None = None
    listed: frozenset[str] = frozenset()
    lost: str = ""
    lost_s: float = 0.0
    refused: str = ""
    broken: str = ""
    drains: str = ""
    same_as: str = ""
    strangers: Mapping[str, Stranger] = field(default_factory=dict)
    failures: tuple[tuple[float, str], ...] = ()
    failing: bool = False
    quarantined_until_s: float = 0.0
    withheld: Withheld | None = None
    cpus: float = 0.0
    unmade: int = 0
    pool: str = ""
    resting_s: float | None = None
    taken_s: float = float("-inf")

    @property
    def ready(self) -> bool:
        return self.facts is not None and not (self.lost or self.refused or self.broken or self.resting)

    @property
    def resting(self) -> bool:
        return self.resting_s is not None

    @property
    def notice(self) -> str:
        """Why it is about to go, as its agent or Ray tells; "" while it stays."""
        told = self.facts.notice if self.facts else None
        return f"{told.reason} ({told.deadline_s:.0f} s were left)" if told else self.drains

    @property
    def unknown(self) -> list[str]:
        """Running attempts there that the store does not know."""
        return sorted(key for key, s in self.strangers.items() if not s.known and s.phase != "ended")

    @property
    def stopping(self) -> list[str]:
        """Running attempts there that do not count any more: they still use their devices."""
        return sorted(key for key, s in self.strangers.items() if s.known and s.phase != "ended")

    def runs(self, key: str) -> bool:
        """Whether it tells of an attempt that is none of ours there, and that has not ended."""
        return key in self.strangers and self.strangers[key].phase != "ended"

    def silent_s(self, now_s: float) -> float:
        return now_s - self.heard_s

    def restarts(self, now_s: float) -> bool:
        """Whether it was to be started again a moment ago."""
        return self.withheld is not None and now_s - self.withheld.restarted_s < RESTART_S


def failed(node: Node, what: str, now_s: float, began_s: float | None = None) -> Node:
    """One more failure of the node itself; the third within ten minutes puts it into quarantine. What is told of a node
    that has not been heard since the last one is the same fault, and so is what began (`began_s`, None: now) before or
    a moment after that.
    """
    recent = tuple((at, why) for at, why in node.failures if now_s - at < WITHIN_S)
    since_s = now_s if began_s is None else began_s
    if node.failing or (recent and since_s - recent[-1][0] < ONE_FAULT_S):
        return replace(node, failing=True)
    recent = (*recent, (now_s, what))
    until_s = now_s + QUARANTINE_S if len(recent) >= FAILURES else node.quarantined_until_s
    return replace(node, failures=recent, failing=True, quarantined_until_s=until_s)


def away_reason(node: Node | None, now_s: float) -> str:
    """Why nothing that lies on the node can be read now, as words behind its name; "" where it can."""
    if node is None:
        return "which has left the fleet"
    if node.lost:
        return f"which has been away for {told_s(max(now_s - node.lost_s, 0.0))}: {node.lost}"
    if node.refused or node.broken:
        return f"which {node.refused or node.broken}"
    if node.resting:
        return f"which is resting; `polyfleet node resume {node.name}` wakes it"
    silent_s = node.silent_s(now_s)
    if node.facts is None or silent_s > NODE_SILENT_S:
        return f"which has not answered for {told_s(max(silent_s, 0.0))}"
    return ""


def closed(node: Node, drained: Mapping[str, str], now_s: float) -> str:
    """Why the whole node takes no work now, or ""."""
    if node.lost:
        return f"node {node.name} is lost: {node.lost}"
    if node.resting:
        return f"node {node.name} is resting: nothing used it, and it may be given back; a job that needs it wakes it"
    if node.refused:
        return f"node {node.name} {node.refused}"
    if node.broken:
        return f"node {node.name}: {node.broken}"
    if node.same_as:
        return f"node {node.name} was given the name of {node.same_as}, which is up; give every node its own name"
    if node.name in drained:
        why = f": {drained[node.name]}" if drained[node.name] else ""
        return f"node {node.name} is drained{why}; `polyfleet node resume {node.name}` ends that"
    if node.notice:
        return f"node {node.name} is about to go: {node.notice}"
    if unknown := node.unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        return f"node {node.name} runs {unknown[0]}{more}, unknown to this server's database; see `polyfleet doctor`"
    if stopping := node.stopping:
        return f"node {node.name} still runs {', '.join(stopping)}, which was replaced and is being stopped"
    if node.listed_s is None:
        return f"node {node.name} has not reported yet what runs there"
    if (left_s := node.quarantined_until_s - now_s) > 0:
        return (
            f"node {node.name} failed {len(node.failures)} times within 10 minutes (last: {node.failures[-1][1]}) and "
            f"takes no jobs for {left_s:.0f} s; `polyfleet node resume {node.name}` ends that"
        )
    if node.withheld and (node.withheld.closing or node.restarts(now_s)):
        return f"node {node.name} is being restarted: Ray keeps its devices reserved although nothing uses them"
    if (silent_s := node.silent_s(now_s)) > NODE_SILENT_S:
        return f"node {node.name} has not answered for {silent_s:.0f} s"
    return ""


def useless(node: Node, drained: Mapping[str, str], now_s: float) -> bool:
    """Whether it is there and takes no work for longer than a moment."""
    broken = node.refused or node.broken or node.same_as or node.notice
    return bool(broken) or node.name in drained or node.quarantined_until_s > now_s


def refusal(facts: NodeFacts) -> str:
    """Why the node cannot be used at all, or ""."""
    if facts.protocol == PROTOCOL:
        return ""
    return f"speaks protocol {facts.protocol}, the server {PROTOCOL}: install the same Polyfleet version"


def drained(events: Iterable[Event]) -> dict[str, str]:
    """Node -> reason, of those that users have drained."""
    found: dict[str, str] = {}
    for event in events:
        name = event.job.removeprefix(OWNER)
        if event.event == "drained":
            found[name] = event.data.get("reason", "")
        elif event.event == "undrained":
            found.pop(name, None)
    return found


def leased(records: Iterable[Record]) -> Leased:
    """devices id -> device number -> the job whose attempt holds it."""
    held: Leased = defaultdict(dict)
    for record in records:
        for devices_id, numbers in record.live.leases if record.live else ():
            held[devices_id].update(dict.fromkeys(numbers, record.job.id))
    return held


def groups(facts: NodeFacts, name: str, reason: str, price_per_hour: float, held: Leased) -> list[Devices]:
    """The equal devices of one node, by kind. Devices that are there but cannot be used are not schedulable, with the
    reason; `reason` is why the whole node is not.
    """
    by_kind: dict[tuple[str, str], list[Device]] = defaultdict(list)
    for device in facts.devices:
        by_kind[device.kind, device.unavailable_reason].append(device)
    found = []
    for (kind, why), devices in by_kind.items():
        devices_id = f"{name}/{kind}{' (unavailable)' if why else ''}"
        found.append(_group(facts, name, devices_id, why or reason, price_per_hour, held.get(devices_id, {}), devices))
    return found


def _group(
    facts: NodeFacts,
    name: str,
    devices_id: str,
    reason: str,
    price_per_hour: float,
    taken: Mapping[int, str],
    devices: list[Device],
) -> Devices:
    first = devices[0]
    return Devices(
        id=devices_id,
        node=name,
        pool=facts.pool,
        environment=facts.environment,
        backend=first.backend,
        kind=first.kind,
        free=tuple(d.index for d in devices if d.index not in taken),
        total=len(devices),
        memory_bytes=min((d.total_memory_bytes for d in devices if d.total_memory_bytes), default=0),
        emulated=first.emulated,
        schedulable=not reason,
        reason=reason,
        price_per_hour=price_per_hour,
        data=facts.data,
        storage=facts.storage_id,
        host=f"{facts.host}/{facts.address}" if first.unified_memory else "",
        host_memory_bytes=max(facts.memory_total_bytes, *(d.total_memory_bytes or 0 for d in devices)),
    )
