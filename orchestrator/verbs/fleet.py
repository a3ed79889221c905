"""The fleet: its pools and its problems."""

from collections.abc import Iterator
from typing import Any

from cluster.errors import FleetError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord
from cluster.hosts import shared_storage
from cluster.serialization import to_plain
from cluster.types import Finding
from orchestrator.core.controller.nodes import allocations
from orchestrator.core.plan.options.quota import holdings
from orchestrator.runtime.agents.agents import NO_FLEET
from orchestrator.runtime.clock import now
from orchestrator.runtime.health.fleet_ready import BRING_UP
from orchestrator.server.http.hub import Hub
from orchestrator.services.service import Service
from orchestrator.services.views import finding_view, pool_view
from orchestrator.verbs.declare import Role, verb
from orchestrator.views.fleet import FindingView, FleetView


@verb("GET /v1/fleet", least=Role.VIEWER)
def show(hub: Hub) -> FleetView:
    """The fleet by pools: kinds, nodes, devices, number of free devices, price."""
    record, runtime = fleet_record.read(), hub.service.runtime
    if record is None:
        raise FleetError(NO_FLEET, BRING_UP)
    state, at = runtime.control, now()
    allocated = allocations(state.records.values())
    pools = _pools(hub.service, record)
    return {
        "name": record.name,
        "address": record.address,
        "state": runtime.problem or record.state,
        "skipped_pools": [{"pool": pool, "reason": reason} for pool, reason in record.skipped_pools],
        "pools": [pool_view(name, spec, state, at.s, allocated) for name, spec in sorted(pools.items())],
        "policy": to_plain(state.policy),
        "projects": to_plain(holdings(state.projects, runtime.snapshot().running)),
    }


@verb("GET /v1/doctor", least=Role.VIEWER)
def doctor(hub: Hub) -> list[FindingView]:
    """Findings: level (info, warning, error), subject, message, remedy, node."""
    service = hub.service
    service.readiness.wait_until_ready()
    rows = [
        (name, finding) for name, agent in service.agents.items() if agent.facts for finding in agent.facts.findings
    ]
    rows += [*service.health_collector.findings(), *service.checkpoint_service.findings()]
    rows += [("", finding) for finding in _storages(service)]
    if service.runtime.problem == NO_FLEET:
        rows.append(("", Finding("warning", "fleet", NO_FLEET, BRING_UP)))
    return [finding_view(name, finding) for name, finding in rows]


def _pools(service: Service, record: FleetRecord) -> dict[str, dict[str, Any]]:
    """Pools with their declaration, {} for one that the fleet file does not name: it need not name those of others."""
    if record.is_ours:
        return record.pools
    nodes = service.runtime.control.nodes.values()
    return {node.facts.pool: {} for node in nodes if node.facts} | record.pools


def _storages(service: Service) -> Iterator[Finding]:
    fleet = service.runtime.fleet
    declared = {name: bool(pool.get("shared_storage")) for name, pool in fleet.pools.items()} if fleet else {}
    return shared_storage.findings([node.facts for _, node in service.agents.ready() if node.facts], declared)
