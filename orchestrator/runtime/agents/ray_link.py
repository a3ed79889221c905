"""Membership of this process in the fleet's Ray cluster: join it, and disconnect when it has ended.

Never waits.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cluster.errors import FleetError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord
from cluster.host.ports import listener_uids, port_of
from cluster.host.processes import ProcessId, is_alive
from cluster.nodes import connect
from orchestrator.runtime.agents.actors import first_line
from orchestrator.runtime.agents.agents import NO_FLEET, Agents
from orchestrator.runtime.agents.ray_calls import RAY

log = logging.getLogger(__name__)

JOIN_S = 30.0
LEAVE_S = 30.0
END_S = 5.0
RETRY_S = 1.0
MAX_BACKOFF_S = 30.0
HEAD_GONE = "the fleet's head is gone"
HEAD_STARTS = "the fleet's head is starting"


class RayLink:
    """State of the membership. Only the controller's thread uses it.

    `fleet`: record of the joined cluster, or None. `hold_reason`: why no job can be started there, or ""; agents and
    attempts are followed as usual. Posts ("joined", fleet, error or None), ("left", fleet, error or None) and
    ("disconnected", error or None).
    """

    def __init__(self, agents: Agents, post: Callable[[tuple[Any, ...]], None]):
        self._agents, self._post = agents, post
        self.fleet: FleetRecord | None = None
        self.hold_reason = ""
        self._activity = ""
        self._since_s = 0.0
        self._failed = ""
        self._failures = 0
        self._raylet: ProcessId | None = None

    def update(self, recorded: FleetRecord | None, release_all: Callable[[], None]) -> str:
        """Return "" if we are in the recorded fleet's cluster, else why not, and start the steps towards it.

        A fleet that another server now controls is left to that server.

        If the head is gone, only `hold_reason` is set: agents work without it, and it restarts with the same cluster.
        The cluster is then joined again, because the head's own node, through which we worked, is a new one.

        `release_all` returns what we hold in a cluster that we leave; it may wait.
        """
        self.hold_reason = ""
        if self._activity and recorded is None:
            return NO_FLEET
        if self._activity:
            return f"{self._activity}, for {time.monotonic() - self._since_s:.0f} s"
        if recorded is not None and recorded.state == "leaving":
            self._leave(recorded, release_all)
            return "the fleet is leaving"
        if (reason := self._agents.superseded_by or _no_cluster(recorded)) or recorded is None:
            self._disconnect()
            return reason
        if self.fleet is None:
            return self._join(recorded)
        if self.fleet.address == recorded.address and self._is_raylet_running():
            if recorded.is_headless:
                self.hold_reason = HEAD_GONE
                return ""
            if self.fleet.head == recorded.head:
                self.fleet = recorded
                return ""
            if not _is_head_listening(recorded):
                self.hold_reason = HEAD_STARTS
                return ""
        self._disconnect()
        return f"joining the Ray cluster at {recorded.address} again"

    def joined(self, fleet: FleetRecord, error: BaseException | None) -> bool:
        """Handle the result of joining; return whether it succeeded."""
        self._activity, self._since_s = "", time.monotonic()
        self._failed = "" if error is None else first_line(error)
        self._failures = 0 if error is None else self._failures + 1
        self.fleet = fleet if error is None else None
        return error is None

    def left(self, fleet: FleetRecord, error: BaseException | None) -> None:
        """Handle the result of leaving, and record it for the `polyfleet down` that waits for this."""
        if error is not None:
            log.warning("leaving the Ray cluster at %s failed: %s", fleet.address, first_line(error))
        self._activity, self.fleet = "", None
        self._agents.clear()
        try:
            fleet_record.write(replace(fleet, state="left"))
        except OSError as e:  # the record still says `leaving`, so this is repeated
            log.warning("leaving %s could not be recorded; it will be retried: %s", fleet.address, e)

    def close(self) -> None:
        """Disconnect when the server ends, within END_S even if the head does not respond."""
        if self.fleet is None:
            return
        try:
            RAY.call("disconnect from the cluster", connect.disconnect, END_S)
        except FleetError as e:
            log.warning("%s", e)

    def _join(self, fleet: FleetRecord) -> str:
        """Start joining if possible; return why we have not joined yet."""
        if not _is_head_listening(fleet):
            return HEAD_GONE if fleet.is_headless else HEAD_STARTS
        if not self._failed or time.monotonic() - self._since_s > _pause_s(fleet, self._failures):
            self._set_activity(f"joining the Ray cluster at {fleet.address}")
            self._call_ray("join the cluster", lambda: self._connect(fleet), JOIN_S, ("joined", fleet))
        return self._failed or f"joining the Ray cluster at {fleet.address}"

    def _connect(self, fleet: FleetRecord) -> None:
        """Join; runs in a thread of RAY."""
        connect.prepare(fleet)
        self._raylet = connect.connect(fleet)

    def _is_raylet_running(self) -> bool:
        """Whether the raylet that we work through is running.

        It may end without the head, if it was cut off from the head or stopped by its owner.
        """
        return self._raylet is None or is_alive(self._raylet)

    def _leave(self, fleet: FleetRecord, release_all: Callable[[], None]) -> None:
        self._set_activity(f"leaving the Ray cluster at {fleet.address}")
        has_joined = self.fleet is not None
        self._call_ray(
            "leave the cluster", lambda: _leave(release_all) if has_joined else None, LEAVE_S, ("left", fleet)
        )

    def _disconnect(self) -> None:
        """Disconnect from a cluster that has ended or has a new head."""
        if self.fleet is None:
            return
        log.info("disconnecting from the Ray cluster at %s", self.fleet.address)
        address, self.fleet = self.fleet.address, None
        self._agents.clear()
        RAY.abandon()
        self._set_activity(f"disconnecting from the Ray cluster at {address}")
        self._call_ray("disconnect from the cluster", connect.disconnect, LEAVE_S, ("disconnected",))

    def disconnected(self, error: BaseException | None) -> None:
        self._activity = ""
        if error is not None:
            log.warning("disconnecting from a Ray cluster failed: %s", first_line(error))

    def _set_activity(self, activity: str) -> None:
        self._activity, self._since_s = activity, time.monotonic()

    def _call_ray(self, name: str, make: Callable[[], Any], limit_s: float, message: tuple[Any, ...]) -> None:
        """Start a call to Ray; its result is posted as `message` with None or the error."""
        RAY.submit(name, make, limit_s, lambda e: self._post((*message, e if isinstance(e, BaseException) else None)))


def before_joining(fleet: FleetRecord | None) -> str:
    """Why a server that has just started does not serve a fleet yet."""
    return f"joining the Ray cluster at {fleet.address}" if fleet and fleet.state == "up" else _no_cluster(fleet)


def _no_cluster(fleet: FleetRecord | None) -> str:
    """Why there is no cluster to join, or ""."""
    if fleet is None:
        return NO_FLEET
    return "" if fleet.state == "up" else f"the fleet is {fleet.state}"


def _is_head_listening(fleet: FleetRecord) -> bool:
    """Whether the head is running and listening; true for clusters of others, whose head cannot be checked.

    Joining and disconnecting would block on a head that does not listen.
    """
    return not fleet.is_embedded or not (fleet.is_headless or listener_uids(port_of(fleet.address)) == frozenset())


def _pause_s(fleet: FleetRecord, failures: int) -> float:
    """Seconds until the next try to join.

    Grows for clusters of others, where each try starts a node of ours.
    """
    return RETRY_S if fleet.is_embedded else min(MAX_BACKOFF_S, RETRY_S * 2.0 ** min(failures, 9))


def _leave(release_all: Callable[[], None]) -> None:
    try:
        release_all()
    finally:
        connect.disconnect()
