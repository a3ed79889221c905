"""Operations of the service for the fleet: its nodes, pools and problems."""

from collections.abc import Iterator
from typing import Any

from cluster.errors import FleetError
from cluster.fleet import fleet_record
from cluster.hosts import shared_storage
from cluster.serialization import to_plain
from cluster.types import Finding
from orchestrator.core.controller.messages import DrainRequested, RemoveRequested, ResumeRequested
from orchestrator.core.controller.nodes import allocations
from orchestrator.core.plan.options.quota import holdings
from orchestrator.runtime.agents.agents import NO_FLEET, Agents
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.runtime.clock import now
from orchestrator.runtime.controller.controller import ControllerThread
from orchestrator.runtime.health.fleet_ready import BRING_UP, FleetReadiness
from orchestrator.runtime.health.health_snapshot import HealthCollector
from orchestrator.services.views import node_view, pool_view
from orchestrator.store.events.event_store import EventStore


class FleetVerbs:
    """Fleet methods of Service."""

    agents: Agents
    runtime: ControllerThread
    store: EventStore
    _fleet: FleetReadiness
    _health_collector: HealthCollector
    _checkpoints: CheckpointService

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes. Raises FleetError if no fleet is running."""
        self._fleet.wait_until_ready()
        if not self.agents.items():
            self._fleet.check_served()
        state, at = self.runtime.control, now()
        allocated = allocations(state.records.values())
        return [node_view(node, state, at.s, allocated) for _, node in sorted(state.nodes.items())]

    def node_drain(self, node: str, now: bool, reason: str) -> dict[str, Any]:
        self._fleet.check_served()
        self.runtime.post_and_wait(DrainRequested(node, reason, now))
        return self._node(node)

    def node_resume(self, node: str) -> dict[str, Any]:
        self._fleet.check_served()
        self.runtime.post_and_wait(ResumeRequested(node))
        return self._node(node)

    def node_remove(self, node: str) -> dict[str, Any]:
        self._fleet.check_served()
        self.runtime.post_and_wait(RemoveRequested(node))
        return {"node": node, "state": "removed"}

    def _node(self, name: str) -> dict[str, Any]:
        view: dict[str, Any] = next((n for n in self.nodes() if n["node"] == name), {"node": name, "state": "unknown"})
        return view

    def fleet(self) -> dict[str, Any]:
        record = fleet_record.read()
        if record is None:
            raise FleetError(NO_FLEET, BRING_UP)
        state, at = self.runtime.control, now()
        allocated = allocations(state.records.values())
        pools = record.pools
        if not record.is_ours:  # the fleet file need not name all pools
            pools = {node.facts.pool: {} for node in state.nodes.values() if node.facts} | record.pools
        return {
            "name": record.name,
            "address": record.address,
            "state": self.runtime.problem or record.state,
            "skipped_pools": [list(pair) for pair in record.skipped_pools],
            "pools": [pool_view(name, spec, state, at.s, allocated) for name, spec in sorted(pools.items())],
            "policy": to_plain(state.policy),
            "projects": to_plain(holdings(state.projects, self.runtime.snapshot().running)),
        }

    def doctor(self) -> list[dict[str, Any]]:
        self._fleet.wait_until_ready()
        rows = [
            (name, finding) for name, agent in self.agents.items() if agent.facts for finding in agent.facts.findings
        ]
        rows += [*self._health_collector.findings(), *self._checkpoints.findings()]
        rows += [("", finding) for finding in self._storages()]
        if self.runtime.problem == NO_FLEET:
            rows.append(("", Finding("warning", "fleet", NO_FLEET, BRING_UP)))
        return [{"node": name, **to_plain(finding)} for name, finding in rows]

    def _storages(self) -> Iterator[Finding]:
        pools = self.runtime.fleet.pools if self.runtime.fleet else {}
        declared = {name: bool(pool.get("shared_storage")) for name, pool in pools.items()}
        return shared_storage.findings([node.facts for _, node in self.agents.ready() if node.facts], declared)

    def health(self) -> dict[str, Any]:
        """The server's own state, read from outside the controller's thread."""
        return self._health_collector.view() | {"jobs": self.store.jobs.counts()}
