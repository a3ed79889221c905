"""Wait until all nodes of a fleet have reported, after the server or the fleet has started."""

import time

from cluster.errors import FleetError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord
from orchestrator.core.model import Devices, Snapshot
from orchestrator.runtime.agents.agents import NO_FLEET, Agents
from orchestrator.runtime.agents.ray_calls import RAY
from orchestrator.runtime.controller.controller import ControllerThread
from orchestrator.runtime.health.last_inventory import LastInventory

BRING_UP = "run `polyfleet up` first"
STATUS_REMEDY = "`polyfleet status` shows its progress, and `polyfleet up` restarts lost parts"
FIRST_NODES_WAIT_S = 20.0
SUBMIT_WAIT_S = 4.0
"""Seconds that a submission waits for the nodes of a fleet that is starting; the job is then accepted unchecked."""
NOT_YET = "no node has reported yet"


class FleetReadiness:
    """The fleet's devices, once its nodes have reported. Thread-safe. `inventory`: the last one of a fleet."""

    def __init__(self, runtime: ControllerThread, agents: Agents, inventory: LastInventory):
        self._runtime, self._agents, self._inventory = runtime, agents, inventory
        self._ready_address = ""
        runtime.on_devices, runtime.on_last_contacts = self._store_inventory, inventory.set_last_contacts

    def devices(self) -> tuple[tuple[Devices, ...] | None, str]:
        """Return (devices to check a submission against, why its job will wait or "").

        The devices are None if the fleet has not reported yet and none is stored from before.
        """
        self.wait_until_ready(SUBMIT_WAIT_S)
        trouble, inventory, fleet = self._runtime.problem, self._inventory.newest, self._runtime.fleet
        if inventory is None or (fleet is not None and not self._is_complete(fleet)):
            return None, f"{trouble or NOT_YET}; the job waits, and its resources are checked once a fleet is up"
        note = f"{trouble}; the job waits, checked against the fleet of {inventory.reported_at}" if trouble else ""
        return inventory.devices, note

    def snapshot(self) -> Snapshot:
        """The planner's snapshot, once the fleet's nodes have reported.

        Raises FleetError if no fleet is served.
        """
        self.check_served()
        if not (self._agents.items() or self._is_autoscaled):
            raise FleetError("no node has reported yet", "`polyfleet status` shows what is missing")
        return self._runtime.snapshot()

    def check_served(self, elsewhere: str = "") -> None:
        """Raise FleetError if no fleet is served: an empty result would look as if there was nothing.

        `elsewhere`: clause that is added to the message after ", and ".
        """
        self.wait_until_ready()
        fleet = fleet_record.read()
        is_up = fleet is not None and fleet.state == "up"
        if trouble := self._runtime.problem or ("" if is_up else NO_FLEET):
            message = f"{trouble}, and {elsewhere}" if elsewhere else trouble
            raise FleetError(message, STATUS_REMEDY if is_up else BRING_UP)

    def pools(self) -> dict[str, list[str]]:
        """Nodes by pool, of the fleet that is up or else of the last inventory."""
        if self._runtime.problem:
            inventory = self._inventory.newest
            pairs = {(d.pool, d.node) for d in inventory.devices} if inventory else set()
        else:
            pairs = {(node.facts.pool, name) for name, node in self._agents.items() if node.facts}
        return {
            pool: sorted(node for pool_of, node in pairs if pool_of == pool)
            for pool in sorted({pool_of for pool_of, _ in pairs})
        }

    def wait_until_ready(self, wait_s: float = FIRST_NODES_WAIT_S) -> None:
        """Wait until every node of the fleet has reported.

        A server that has just started has no nodes yet, and would otherwise report that there are no nodes, no
        checkpoints and no logs.
        """
        joined = self._runtime.fleet
        if joined is not None and joined.address == self._ready_address and not self._runtime.problem:
            return
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            fleet = fleet_record.read()
            if fleet is None or fleet.state != "up" or fleet.is_headless:
                return
            if RAY.blocked() or self._agents.superseded_by:
                return  # nodes that have not reported by now will not soon
            if self._is_complete(fleet):
                self._inventory.update(self._runtime.snapshot().possible)
                self._ready_address = fleet.address
                return
            time.sleep(0.05)

    @property
    def _is_autoscaled(self) -> bool:
        """Whether the fleet is autoscaled: it may have no node until a job needs one."""
        return bool(self._runtime.control.scaling.groups)

    def _is_complete(self, fleet: FleetRecord) -> bool:
        """Whether every node of the fleet has reported its facts or is lost."""
        if self._ready_address == fleet.address:
            return True
        reported = {name for name, agent in self._agents.items() if agent.facts or agent.lost_reason}
        return bool(reported or self._is_autoscaled) and reported >= {
            p.node for p in fleet.running() if p.role == "worker"
        }

    def _store_inventory(self, devices: tuple[Devices, ...]) -> None:
        """Store the devices as inventory once the fleet is complete."""
        fleet = self._runtime.fleet
        if fleet is not None and self._is_complete(fleet):
            self._inventory.update(devices)
