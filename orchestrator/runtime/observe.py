"""From what agents told to what the core sees: nodes become groups of equal devices, leases are subtracted."""

from collections import defaultdict
from typing import Any

from cluster.vocabulary import Device, NodeFacts
from orchestrator.core.fold import Record, running
from orchestrator.core.model import Devices, Job, Snapshot
from orchestrator.runtime.agents import Agent

Leased = dict[str, dict[int, str]]


def leased(records: list[Record]) -> Leased:
    """devices id -> device number -> the job whose attempt holds it."""
    held: Leased = defaultdict(dict)
    for record in records:
        for devices_id, numbers in record.live.leases if record.live else ():
            held[devices_id].update(dict.fromkeys(numbers, record.job.id))
    return held


def snapshot(
    now_s: float,
    nodes: list[tuple[str, Agent]],
    prices: dict[str, float],
    records: list[Record],
    waiting: tuple[Job, ...],
) -> Snapshot:
    """`prices`: pool -> price per hour of one device."""
    held = leased(records)
    devices = [d for name, agent in nodes if agent.facts for d in groups(name, agent, agent.facts, prices, held)]
    return Snapshot(now_s, tuple(devices), waiting, running(records))


def groups(name: str, agent: Agent, facts: NodeFacts, prices: dict[str, float], held: Leased) -> list[Devices]:
    """The equal devices of one node, by kind. Devices that are there but cannot be used are not schedulable, with the
    reason.
    """
    by_kind: dict[tuple[str, str], list[Device]] = defaultdict(list)
    for device in facts.devices:
        by_kind[device.kind, device.unavailable_reason].append(device)
    return [_group(name, agent, facts, prices, held, kind, why, devices) for (kind, why), devices in by_kind.items()]


def _group(
    name: str,
    agent: Agent,
    facts: NodeFacts,
    prices: dict[str, float],
    held: Leased,
    kind: str,
    why: str,
    devices: list[Device],
) -> Devices:
    devices_id = f"{name}/{kind}"
    first = devices[0]
    reason = why or _closed(name, agent)
    return Devices(
        id=devices_id if not why else f"{devices_id} (unavailable)",
        node=name,
        pool=facts.pool,
        environment=facts.environment,
        backend=first.backend,
        kind=kind,
        free=tuple(d.index for d in devices if d.index not in held.get(devices_id, {})),
        total=len(devices),
        memory_bytes=min(d.total_memory_bytes or 0 for d in devices),
        emulated=first.emulated,
        schedulable=not reason,
        reason=reason,
        price_per_hour=prices.get(facts.pool, 0.0),
    )


def _closed(name: str, agent: Agent) -> str:
    """Why the whole node takes no work, or ""."""
    if agent.lost:
        return f"node {name} is lost: {agent.lost}"
    if unknown := agent.unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        return f"node {name} runs {unknown[0]}{more}, unknown to this server's database; see `polyfleet doctor`"
    return ""


def pool_view(pool: str, spec: dict[str, Any], nodes: list[tuple[str, Agent]], held: Leased) -> dict[str, Any]:
    """One line of `polyfleet status`: `spec` is the declared PoolSpec as plain data, {} for an attached cluster."""
    found = [(n, a) for n, a in nodes if a.facts and a.facts.pool == pool]
    devices = [d for name, a in found if a.facts and not a.lost for d in groups(name, a, a.facts, {}, held)]
    facts = found[0][1].facts if found else None
    return {
        "pool": pool,
        "backend": spec.get("backend") or (facts.backend if facts else ""),
        "environment": facts.environment if facts else "",
        "kinds": sorted({d.kind for d in devices}),
        "nodes": sum(not a.lost for _, a in found),
        "nodes_declared": spec.get("nodes", len(found)),
        "devices": sum(d.total for d in devices if d.schedulable),
        "free": sum(len(d.free) for d in devices if d.schedulable),
        "price_per_hour": spec.get("price_per_hour", 0.0),
    }
