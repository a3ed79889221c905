"""List, add and remove hosts of the running fleet. The fleet file itself is changed only by its user."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster import paths
from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError, UserError, nearest
from cluster.fleet.fleet_record import FleetRecord, HostRecord
from cluster.fleet.fleet_spec import FleetSpec, parse_fleet
from cluster.fleet.policies import scheduler_data
from cluster.hosts import fleet, head, pending_stops
from cluster.nodes import embedded
from cluster.nodes.ray_head import HEAD
from orchestrator.client import lifecycle
from orchestrator.client.client import Client, connect
from orchestrator.client.inventory import state_text
from orchestrator.home import daemon

if TYPE_CHECKING:
    from orchestrator.views.fleet import NodeView

Progress = Callable[[str], None]
Data = dict[str, Any]
MOVE_AWAY_S = 60.0
STOP_PENDING = "away: the next `up` or `down` that reaches it stops it"


def rows() -> list[Data]:
    """A row for each host, and for each removed host that could not be stopped yet because it was away."""
    record = embedded.record()
    states = _states()
    hosts = record.hosts if record is not None else ()
    return [
        *(
            _row(host, _head(record, host) | {node: states.get(node, "unknown") for node in host.nodes})
            for host in hosts
        ),
        *(_row(host, dict.fromkeys(host.nodes, STOP_PENDING)) for host in pending_stops.hosts()),
    ]


def _head(record: FleetRecord | None, host: HostRecord) -> dict[str, str]:
    """State of the head, if it is on this host."""
    if record is None or host.name != record.head_host:
        return {}
    return {HEAD: "ready" if head.is_listening(record) else "does not respond"}


def _row(host: HostRecord, nodes: dict[str, str]) -> Data:
    return {"host": host.host, "address": host.address, "nodes": nodes, "home": host.home}


def _states() -> dict[str, str]:
    if daemon.find_server(paths.home()) is None:
        return {}
    with connect(start=False) as client:
        return {node["node"]: state_text(node) for node in client.nodes.list()}


def add(pool: str, host: str, address: str, devices: int, progress: Progress) -> None:
    """Add a host to a pool. Raises NotFound for a pool without hosts, SpecError for an invalid host, else as `up`."""
    record = _running_fleet()
    if pool not in record.pools or not record.pools[pool].get("hosts"):
        pools = [name for name, spec in record.pools.items() if spec.get("hosts")]
        raise NotFound(f"fleet {record.name!r} has no pool {pool!r} with hosts", nearest(pool, pools))
    added = {"host": host, "address": address} | ({"devices": devices} if devices else {})
    others = [one for one in record.pools[pool]["hosts"] if one["host"] != host]
    lifecycle.change(with_hosts(record, pool, [*others, added]), progress)


def remove(host: str, progress: Progress) -> None:
    """Remove a host after its attempts saved and moved, which gets at most a minute. Raises NotFound, and Conflict for
    the host of the head.
    """
    record = _running_fleet()
    removed = next((one for one in record.hosts if host in (one.host, one.name)), None)
    if removed is None:
        raise NotFound(f"fleet {record.name!r} has no host {host!r}", nearest(host, [h.host for h in record.hosts]))
    if removed.name == record.head_host:
        remedy = "run `polyfleet down`, write another host at `head` in the fleet file, then run `polyfleet up -f FILE`"
        raise Conflict(f"host {removed.host} has the fleet's head", remedy)
    remaining = _without_host(record, removed)
    _move_away(removed, progress)
    lifecycle.change(remaining, progress)


def _running_fleet() -> FleetRecord:
    record = embedded.record()
    if record is None or not record.is_ours:
        raise FleetError("no fleet of this home is up", "run `polyfleet up -f FILE` first")
    return record


def with_hosts(record: FleetRecord, pool: str, hosts: list[Data]) -> FleetSpec:
    """The running fleet, with these hosts in a pool."""
    pools = record.pools | {pool: record.pools[pool] | {"hosts": hosts}}
    return _with_pools(record, pools)


def _with_pools(record: FleetRecord, pools: Data) -> FleetSpec:
    scheduler = scheduler_data(record.policy_spec)
    return parse_fleet(embedded.fleet_data(record) | {"pools": pools, "scheduler": scheduler})


def _without_host(record: FleetRecord, host: HostRecord) -> FleetSpec:
    """The fleet without `host`. Raises NotFound if a pool would have no host left: that would be another fleet."""
    pools = {}
    for name, pool in record.pools.items():
        remaining = [one for one in pool["hosts"] if one["host"] != host.host]
        if pool["hosts"] and not remaining:
            raise NotFound(
                f"host {host.host} is the last one of pool {name!r}",
                "run `polyfleet down`, remove the pool from the fleet file, then run `polyfleet up -f FILE`",
            )
        pools[name] = pool | {"hosts": remaining, "min_hosts": min(pool["min_hosts"], len(remaining))}
    return _with_pools(record, pools)


def _move_away(host: HostRecord, progress: Progress) -> None:
    """Drain the host, stop it and remove its nodes from the server, so that they do not count as lost. Nodes of the
    same name may join again later and take work then.
    """
    with connect(progress=progress) as client:
        for node in host.nodes:
            with suppress(PolyfleetError):
                client.nodes.drain(node, now=True, reason=f"host {host.host} is removed")
        _wait(lambda: not _has_jobs(client.nodes.list(), host.nodes))
        embedded.remove_hosts({host.name})
        fleet.leave([host], progress)
        for node in host.nodes:
            _wait(partial(_remove_node, client, node))


def _remove_node(client: Client, node: str) -> bool:
    """Remove a node from the server; return whether it is removed. The server refuses until Ray has noticed its end."""
    try:
        client.nodes.remove(node)
    except NotFound:
        return True
    except UserError:
        return False
    return True


def _wait(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MOVE_AWAY_S
    while time.monotonic() < deadline and not is_done():
        time.sleep(0.2)


def _has_jobs(nodes: "Sequence[NodeView]", names: tuple[str, ...]) -> bool:
    return any(device["allocated_to"] for node in nodes if node["node"] in names for device in node["devices"])
