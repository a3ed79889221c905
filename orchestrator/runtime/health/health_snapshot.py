"""Collect the current state of the server and its fleet for `doctor` and `status`.

Runs in the request's thread. It takes no lock that the controller's thread holds while waiting, and calls neither Ray
nor an agent, so it returns even if these hang.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cluster.serialization import to_plain
from cluster.types import Finding
from orchestrator.core.controller.nodes import Node
from orchestrator.core.fleet.leaked_devices import list_leaks as leaks
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.agents.ray_calls import RAY
from orchestrator.runtime.clock import now
from orchestrator.runtime.controller.controller import ControllerThread
from orchestrator.runtime.controller.repair import RepairThread
from orchestrator.runtime.health import health
from orchestrator.runtime.health.health import ControllerHealth, HealthSnapshot, NodeHealth, StoreHealth
from orchestrator.runtime.health.host_rejoin import RejoinThread
from orchestrator.store.events.event_store import EventStore

REPAIRS_VISIBLE_S = 600.0
NAMED_ROWS = 20


class HealthCollector:
    """Makes health snapshots.

    `repairs`: the threads that restart lost parts of the fleet; empty if switched off.
    """

    def __init__(
        self,
        store: EventStore,
        agents: Agents,
        runtime: ControllerThread,
        repairs: Sequence[RepairThread | RejoinThread],
    ):
        self._store, self._agents, self._runtime, self._repairs = store, agents, runtime, repairs

    def snapshot(self) -> HealthSnapshot:
        runtime, at = self._runtime, now()
        return HealthSnapshot(
            self._controller(),
            self._database(),
            tuple(RAY.blocked()),
            RAY.exhausted,
            tuple(
                NodeHealth(
                    name,
                    _down_reason(node),
                    node.ready,
                    0.0 if node.resting else node.silent_s(at.s),
                    tuple(node.unknown_attempts),
                    node.agent_error if node.failed_agent_starts and not node.lost_reason else "",
                )
                for name, node in runtime.control.nodes.items()
            ),
            tuple(leaks(runtime.control, at)),
            tuple(runtime.liveness.repairs(REPAIRS_VISIBLE_S)),
            tuple(dict.fromkeys(reason for repair in self._repairs for reason in repair.waiting.values())),
            runtime.database_replaced,
            runtime.repairs_nodes,
        )

    def _controller(self) -> ControllerHealth:
        runtime, liveness = self._runtime, self._runtime.liveness
        return ControllerHealth(
            liveness.age_s,
            liveness.activity,
            liveness.error,
            liveness.failures,
            runtime.problem,
            runtime.problem_s,
            runtime.hold_reason,
            bool(self._agents.superseded_by),
            runtime.control.memory.fault,
            runtime.control.policy.name,
            runtime.control.memory.gap,
        )

    def _database(self) -> StoreHealth:
        now = self._store.state()
        damaged = tuple(str(row) for row in now.damage.rows[:NAMED_ROWS])
        return StoreHealth(
            now.where,
            now.error,
            now.failed_s,
            now.size_bytes,
            now.free_bytes,
            damaged,
            now.damage.count,
            now.reports_lost,
        )

    def findings(self) -> list[tuple[str, Finding]]:
        """(node or "", finding) about the server itself, its fleet and what jobs wrote."""
        return [*health.findings(self.snapshot()), *_unreadable_output(self._agents.unreadable_output())]

    def view(self) -> dict[str, Any]:
        """The snapshot and its findings as JSON data, for `status`."""
        view: dict[str, Any] = to_plain(self.snapshot())
        return view | {"findings": [{"node": node, **to_plain(finding)} for node, finding in self.findings()]}


def _down_reason(node: Node) -> str:
    """Why the node cannot be used at all, or ""."""
    return node.lost_reason or node.unsupported_reason or node.agent_error


def _unreadable_output(by_node: Iterable[tuple[str, dict[str, dict[str, Any]]]]) -> Iterator[tuple[str, Finding]]:
    """Yield (node, finding) for each attempt with unreadable output. The subject of a finding is the job."""
    for node, attempts in by_node:
        for key, record in sorted(attempts.items()):
            job = key.rsplit(".", 2)[0]
            times = "once" if record["count"] == 1 else f"{record['count']} times"
            message = f"attempt {key} wrote invalid output {times}; the last: {record['reason']}"
            yield node, Finding("warning", job, message, f"run `polyfleet logs {job}`, or `polyfleet cancel {job}`")
