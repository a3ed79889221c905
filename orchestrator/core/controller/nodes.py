"""State of nodes in the controller, and the devices that it may use there. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cluster.types import Device, NodeFacts
from orchestrator.core.jobs.fold import Record
from orchestrator.core.model import Devices, Event, TpuSlice
from orchestrator.core.timing import NODE_SILENT_S, duration_text
from workers.protocol.messages import PROTOCOL

OWNER_PREFIX = "node/"
"""Prefix of a node's name in place of a job id in the log; no job id may begin with it."""

EVENTS = ("drained", "undrained")

MAX_FAILURES = 3
QUARANTINE_WINDOW_S = 600.0
SAME_FAULT_S = 15.0
"""Seconds in which several reports (from Ray, the agent's end, each lost attempt) count as one fault; see
`record_failure`.
"""

QUARANTINE_S = 600.0

NODE_RESTART_S = 30.0
"""Time for a restarted node to return: usually seconds, more on a busy machine."""

Allocations = dict[str, dict[int, str]]


@dataclass(frozen=True, slots=True)
class UntrackedAttempt:
    """Untracked attempt that a node lists, with its cursor and phase. `is_in_log`: its job is in our log or store."""

    cursor: int
    phase: str
    is_in_log: bool
    requested_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StuckReservation:
    """Stuck reservation: Ray reserves resources of a node for a placement group that is gone. Monotonic seconds.

    `since_s`: when that was first observed, `last_failed_s`: when a launch last failed because of it, `restarted_s`:
    when the node's restart was last requested. `is_draining`: no launches begin there, and running launches are waited
    for.
    """

    since_s: float
    last_failed_s: float
    restarted_s: float = float("-inf")
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """State of a node. Times are monotonic seconds.

    `last_contact_s`: time of its newest reply, or of its appearance. `list_requested_s`: when the newest list of its
    attempts was requested, None before the first. `lost_reason` is "" while Ray lists it as alive; `lost_s` is since
    when a lost node could have returned. `unsupported_reason`: why it cannot be used at all (another protocol);
    `agent_error`: why its agent cannot list what runs there; `ray_drain_reason`: Ray's termination notice.
    `duplicate_of`: its declared name, if another live node has that. `failures`: the newest ones as (time, reason).
    `in_failure`: a failure was recorded since its last reply. `stuck`: see core/fleet/leaked_devices.py. `cpus`: number
    of CPUs that Ray allocates there, 0 if unknown. `failed_agent_starts`: number of times in a row that its agent
    could not be started or ended without a reason. `agent_restarts`: number of its agent's recent restarts for
    silence, see core/fleet/membership.py. `resting_s`: when its agent was last ended so that an autoscaler can remove
    the node, None while it should have an agent. `foreign_use_s`: when a launch last failed because another user of the
    Ray cluster holds devices there.
    """

    name: str
    ray_id: str
    last_contact_s: float
    facts: NodeFacts | None = None
    has_agent: bool = False
    agent_requested_s: float | None = None
    agent_restarted_s: float = 0.0
    agent_restarts: int = 0
    list_requested_s: float | None = None
    listed: frozenset[str] = frozenset()
    lost_reason: str = ""
    lost_s: float = 0.0
    unsupported_reason: str = ""
    agent_error: str = ""
    ray_drain_reason: str = ""
    duplicate_of: str = ""
    untracked: Mapping[str, UntrackedAttempt] = field(default_factory=dict)
    failures: tuple[tuple[float, str], ...] = ()
    in_failure: bool = False
    quarantined_until_s: float = 0.0
    stuck: StuckReservation | None = None
    cpus: float = 0.0
    failed_agent_starts: int = 0
    pool: str = ""
    resting_s: float | None = None
    foreign_use_s: float = float("-inf")

    @property
    def ready(self) -> bool:
        return self.facts is not None and not (
            self.lost_reason or self.unsupported_reason or self.agent_error or self.resting
        )

    @property
    def resting(self) -> bool:
        return self.resting_s is not None

    @property
    def notice(self) -> str:
        """Termination notice from its agent or Ray; "" without one."""
        notice = self.facts.notice if self.facts else None
        return f"{notice.reason} ({notice.deadline_s:.0f} s were left)" if notice else self.ray_drain_reason

    @property
    def unknown_attempts(self) -> list[str]:
        """Running attempts on the node whose jobs are not in the store."""
        return sorted(key for key, s in self.untracked.items() if not s.is_in_log and s.phase != "ended")

    @property
    def stopping_attempts(self) -> list[str]:
        """Running attempts on the node that do not count any more, but still use their devices."""
        return sorted(key for key, s in self.untracked.items() if s.is_in_log and s.phase != "ended")

    def runs(self, key: str) -> bool:
        """Return True if the node lists this untracked attempt as not ended."""
        return key in self.untracked and self.untracked[key].phase != "ended"

    def silent_s(self, now_s: float) -> float:
        return now_s - self.last_contact_s

    def is_restarting(self, now_s: float) -> bool:
        """Return True if a restart of the node was requested in the last NODE_RESTART_S seconds."""
        return self.stuck is not None and now_s - self.stuck.restarted_s < NODE_RESTART_S


def record_failure(node: Node, what: str, now_s: float, began_s: float | None = None) -> Node:
    """Record a failure of the node itself; the third within ten minutes puts it into quarantine.

    It is the same fault as the last failure if the node has not responded since, or if it began (`began_s`, None: now)
    before that failure or up to SAME_FAULT_S after it.
    """
    recent = tuple((at, why) for at, why in node.failures if now_s - at < QUARANTINE_WINDOW_S)
    since_s = now_s if began_s is None else began_s
    if node.in_failure or (recent and since_s - recent[-1][0] < SAME_FAULT_S):
        return replace(node, in_failure=True)
    recent = (*recent, (now_s, what))
    until_s = now_s + QUARANTINE_S if len(recent) >= MAX_FAILURES else node.quarantined_until_s
    return replace(node, failures=recent, in_failure=True, quarantined_until_s=until_s)


def away_reason(node: Node | None, now_s: float) -> str:
    """Say why files on the node cannot be read now, as a clause to follow its name; "" if they can."""
    if node is None:
        return "which has left the fleet"
    if node.lost_reason:
        return f"which has been away for {duration_text(max(now_s - node.lost_s, 0.0))}: {node.lost_reason}"
    if node.unsupported_reason or node.agent_error:
        return f"which {node.unsupported_reason or node.agent_error}"
    if node.resting:
        return f"which is resting; to wake it, run `polyfleet node resume {node.name}`"
    silent_s = node.silent_s(now_s)
    if node.facts is None or silent_s > NODE_SILENT_S:
        return f"which has not answered for {duration_text(max(silent_s, 0.0))}"
    return ""


def closed_reason(node: Node, drained: Mapping[str, str], now_s: float) -> str:
    """Say why the node takes no jobs now, or ""."""
    if node.lost_reason:
        return f"node {node.name} is lost: {node.lost_reason}"
    if node.resting:
        return f"node {node.name} is resting: nothing used it; a job that needs it wakes it"
    if node.unsupported_reason:
        return f"node {node.name} {node.unsupported_reason}"
    if node.agent_error:
        return f"node {node.name}: {node.agent_error}"
    if node.duplicate_of:
        return f"node {node.name} has the same name as {node.duplicate_of}, which is up; give every node its own name"
    if node.name in drained:
        why = f": {drained[node.name]}" if drained[node.name] else ""
        return f"node {node.name} is drained{why}; to use it again, run `polyfleet node resume {node.name}`"
    if node.notice:
        return f"node {node.name} is about to shut down: {node.notice}"
    if attempts := node.unknown_attempts:
        more = f" and {len(attempts) - 1} more" if len(attempts) > 1 else ""
        return f"node {node.name} runs {attempts[0]}{more}, unknown to this server's database; run `polyfleet doctor`"
    if stopping_attempts := node.stopping_attempts:
        return f"node {node.name} still runs {', '.join(stopping_attempts)}, which was replaced and is being stopped"
    if node.list_requested_s is None:
        return f"node {node.name} has not reported its running attempts yet"
    if (left_s := node.quarantined_until_s - now_s) > 0:
        return (
            f"node {node.name} failed {len(node.failures)} times within 10 minutes (last: {node.failures[-1][1]}) and "
            f"takes no jobs for {left_s:.0f} s; to use it now, run `polyfleet node resume {node.name}`"
        )
    if node.stuck and (node.stuck.is_draining or node.is_restarting(now_s)):
        return f"node {node.name} is being restarted: Ray keeps its devices reserved although nothing uses them"
    if (silent_s := node.silent_s(now_s)) > NODE_SILENT_S:
        return f"node {node.name} has not answered for {silent_s:.0f} s"
    return ""


def is_unusable(node: Node, drained: Mapping[str, str], now_s: float) -> bool:
    """Return True if an existing node takes no jobs for a longer time."""
    broken = node.unsupported_reason or node.agent_error or node.duplicate_of or node.notice
    return bool(broken) or node.name in drained or node.quarantined_until_s > now_s


def unsupported_reason(facts: NodeFacts) -> str:
    """Say why the node cannot be used at all, or ""."""
    if facts.protocol == PROTOCOL:
        return ""
    return f"speaks protocol {facts.protocol}, but the server {PROTOCOL}: install the same Polyfleet version on both"


def drained_nodes(events: Iterable[Event]) -> dict[str, str]:
    """Return the nodes that users have drained, with the reasons."""
    reasons: dict[str, str] = {}
    for event in events:
        name = event.job.removeprefix(OWNER_PREFIX)
        if event.event == "drained":
            reasons[name] = event.data.get("reason", "")
        elif event.event == "undrained":
            reasons.pop(name, None)
    return reasons


def allocations(records: Iterable[Record]) -> Allocations:
    """Return the holder of each allocated device: devices id -> device number -> job."""
    holders: Allocations = defaultdict(dict)
    for record in records:
        for devices_id, numbers in record.live_attempt.allocation if record.live_attempt else ():
            holders[devices_id].update(dict.fromkeys(numbers, record.job.id))
    return holders


def device_groups(
    facts: NodeFacts, name: str, reason: str, price_per_hour: float, allocated: Allocations
) -> list[Devices]:
    """Group the equal devices of one node by kind.

    Devices that exist but cannot be used are not schedulable, with their reason; `reason` is why the node itself is
    not.
    """
    by_kind: dict[tuple[str, str], list[Device]] = defaultdict(list)
    for device in facts.devices:
        by_kind[device.kind, device.unavailable_reason].append(device)
    grouped = []
    for (kind, why), devices in by_kind.items():
        devices_id = f"{name}/{kind}{' (unavailable)' if why else ''}"
        grouped.append(
            _group(facts, name, devices_id, why or reason, price_per_hour, allocated.get(devices_id, {}), devices)
        )
    return grouped


def _group(
    facts: NodeFacts,
    name: str,
    devices_id: str,
    reason: str,
    price_per_hour: float,
    allocated: Mapping[int, str],
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
        free=tuple(d.index for d in devices if d.index not in allocated),
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
        tpu_slice=_tpu_slice(first),
    )


def _tpu_slice(device: Device) -> TpuSlice | None:
    """Return the TPU slice of a host, from its properties; None if the slice has one host only."""
    properties = device.properties
    hosts, worker = (value if type(value) is int else 0 for value in map(properties.get, ("slice_hosts", "worker_id")))
    return TpuSlice(str(properties.get("slice_name") or ""), hosts, worker) if hosts > 1 else None
