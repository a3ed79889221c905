"""What the nodes of the fleet that is up have shown: waited for where the server, or the fleet, has just begun."""

import time

from cluster import fleet_record
from cluster.errors import FleetError
from cluster.fleet_record import FleetRecord
from orchestrator.core.model import Devices, Snapshot
from orchestrator.runtime.agents import NO_FLEET, Agents
from orchestrator.runtime.controller import Runtime
from orchestrator.runtime.last_inventory import KnownDevices
from orchestrator.runtime.ray_calls import RAY

BRING_UP = "run `polyfleet up` first"
UP_SHOWS = "`polyfleet status` shows how far it is, and `polyfleet up` brings it back"
FIRST_NODES_WAIT_S = 20.0
SUBMIT_WAIT_S = 4.0
"""For the nodes of a fleet that has just come up; then a job is accepted and waits for them."""
NOT_YET = "no node has reported yet"


class FleetSeen:
    """Safe to use from many threads. `known` keeps the devices that were seen last."""

    def __init__(self, runtime: Runtime, agents: Agents, known: KnownDevices):
        self._runtime, self._agents, self._known = runtime, agents, known
        self._settled = ""
        runtime.seen, runtime.heard = self._look, known.hear

    def devices(self) -> tuple[tuple[Devices, ...] | None, str]:
        """What a submission is checked against, None where no fleet was ever seen; and why a job will wait, or ""."""
        self.settle(SUBMIT_WAIT_S)
        trouble, known, fleet = self._runtime.trouble, self._known.newest, self._runtime.fleet
        if known is None or (fleet is not None and not self._complete(fleet)):
            return None, f"{trouble or NOT_YET}; the job waits, and what it asks for is checked once a fleet is up"
        waits = f"{trouble}; the job waits, checked against the fleet of {known.seen_at}" if trouble else ""
        return known.devices, waits

    def snapshot(self) -> Snapshot:
        """The snapshot, once the fleet that is up has shown its nodes. Raises FleetError when there is none."""
        self.check_served()
        if not (self._agents.items() or self._grows):
            raise FleetError("no node has reported yet", "`polyfleet status` shows what is missing")
        return self._runtime.snapshot()

    def check_served(self, elsewhere: str = "") -> None:
        """Raises FleetError where no fleet is served: to answer with nothing would say that there is nothing.

        `elsewhere` is what there may be nevertheless, behind "no fleet is up, and ".
        """
        self.settle()
        fleet = fleet_record.read()
        is_up = fleet is not None and fleet.state == "up"
        if trouble := self._runtime.trouble or ("" if is_up else NO_FLEET):
            told = f"{trouble}, and {elsewhere}" if elsewhere else trouble
            raise FleetError(told, UP_SHOWS if is_up else BRING_UP)

    def pools(self) -> dict[str, list[str]]:
        """Nodes by pool, of the fleet that is up, or else as they were seen last."""
        if self._runtime.trouble:
            known = self._known.newest
            pairs = {(d.pool, d.node) for d in known.devices} if known else set()
        else:
            pairs = {(node.facts.pool, name) for name, node in self._agents.items() if node.facts}
        return {pool: sorted(node for of, node in pairs if of == pool) for pool in sorted({of for of, _ in pairs})}

    def settle(self, wait_s: float = FIRST_NODES_WAIT_S) -> None:
        """Until every node of the fleet that is up is known: a server that has just started knows none, and would
        answer that there are no nodes, no checkpoints and no logs.
        """
        joined = self._runtime.fleet
        if joined is not None and joined.address == self._settled and not self._runtime.trouble:
            return
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            fleet = fleet_record.read()
            if fleet is None or fleet.state != "up" or fleet.headless:
                return
            if RAY.blocked() or self._agents.overtaken:
                return  # what has not shown itself by now does not within a moment
            if self._complete(fleet):
                self._known.look(self._runtime.snapshot().possible)
                self._settled = fleet.address
                return
            time.sleep(0.05)

    @property
    def _grows(self) -> bool:
        """It may have no node, until a job needs one."""
        return bool(self._runtime.control.scaling.groups)

    def _complete(self, fleet: FleetRecord) -> bool:
        """Every node of the fleet has told what it has, or is lost."""
        if self._settled == fleet.address:
            return True
        known = {name for name, agent in self._agents.items() if agent.facts or agent.lost}
        return bool(known or self._grows) and known >= {p.node for p in fleet.living() if p.role == "worker"}

    def _look(self, devices: tuple[Devices, ...]) -> None:
        """Half of a fleet is not its inventory."""
        fleet = self._runtime.fleet
        if fleet is not None and self._complete(fleet):
            self._known.look(devices)
