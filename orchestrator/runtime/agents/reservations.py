"""Ray placement groups behind our allocations, so that other programs in the cluster see them.

A group is named after its devices (`allocation_name`, core/controller/attempts.py), not after an attempt: the next
attempt on the same devices uses it.
"""

import threading
import time
from typing import Any

from cluster.fleet.identity import fleet_identity, reservation_prefix
from cluster.paths import home
from orchestrator.runtime.agents import ray_capacity
from orchestrator.runtime.agents.ray_calls import RAY, with_time_limit
from orchestrator.runtime.agents.ray_capacity import Resources

WAIT_S = 10.0
POLL_S = 0.005
LIMIT_S = 10.0
PENDING_S = 2.0
"""Seconds to wait for a pending group: Ray retries a group that did not fit every second."""


class _ReservationLocks:
    """Locks and newest groups: per cluster, one call at a time changes the reservation of the same devices.

    That includes late calls, after a head that did not respond. A reservation that arrives too late is removed, unless
    the next launch uses it.
    """

    def __init__(self) -> None:
        self._locks: dict[tuple[int, str], threading.Lock] = {}
        self._newest: dict[str, Any] = {}

    def lock(self, allocation_name: str) -> threading.Lock:
        """Lock of these devices in the current cluster. Calls to a cluster that was left may hold theirs for ever."""
        return self._locks.setdefault((RAY.cluster, allocation_name), threading.Lock())

    def set_newest(self, allocation_name: str, group: Any) -> None:
        self._newest[allocation_name] = group

    def remove_newest(self, allocation_name: str) -> None:
        self._newest.pop(allocation_name, None)

    def release_late(self, group: Any) -> None:
        allocation_name = next(
            (allocation_name for allocation_name, newest in list(self._newest.items()) if newest is group), None
        )
        if allocation_name is not None and not RAY.is_left:
            with self.lock(allocation_name):
                if self._newest.get(allocation_name) is group:
                    _remove(self._newest.pop(allocation_name))


_LOCKS = _ReservationLocks()


def _remove(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


@with_time_limit("reserve devices", 2 * WAIT_S + LIMIT_S, on_late_value=_LOCKS.release_late)
def reserve(allocation_name: str, bundles: list[Resources], ray_node_ids: list[str]) -> Any:
    """Reserve `bundles[i]` on node i until released, independent of this process.

    An existing group for the devices on these nodes is reused. Raises NoCapacity if the resources are not free.
    """
    with _LOCKS.lock(allocation_name):
        group = _reserve(allocation_name, bundles, ray_node_ids)
        _LOCKS.set_newest(allocation_name, group)
        return group


def _reserve(allocation_name: str, bundles: list[Resources], ray_node_ids: list[str]) -> Any:
    """Reserve, or return None if the caller has stopped waiting.

    A group created late would be removed while Ray is still creating it, and Ray might then keep its resources reserved
    for nothing.
    """
    from ray.util.placement_group import placement_group

    existing = _find(allocation_name)
    if RAY.is_late:
        return None
    if existing is not None:
        if _is_created(existing) and _is_on_nodes(existing, ray_node_ids):
            return existing
        _remove(existing)
    _wait_for_capacity(bundles, ray_node_ids)
    if RAY.is_late:
        return None
    selectors = [{"ray.io/node-id": node_id} for node_id in ray_node_ids]
    group = placement_group(
        bundles, strategy="PACK", lifetime="detached", name=_name(allocation_name), bundle_label_selector=selectors
    )
    if not group.wait(timeout_seconds=WAIT_S):
        _remove(group)
        raise ray_capacity.no_capacity(bundles, ray_node_ids)
    return group


def _name(allocation_name: str) -> str:
    return f"{reservation_prefix(fleet_identity(home()))}{allocation_name}"


def _find(allocation_name: str) -> Any:
    """Find the group of these devices by its name, because Ray's table also keeps removed groups."""
    from ray.util.placement_group import get_placement_group

    try:
        return get_placement_group(_name(allocation_name))
    except ValueError:
        return None


def _is_created(group: Any) -> bool:
    """Check that a group is created; wait shortly for one that an earlier server has requested."""
    return _state(group) == "CREATED" or (_state(group) == "PENDING" and bool(group.wait(timeout_seconds=PENDING_S)))


def _state(group: Any) -> str:
    from ray.util.placement_group import placement_group_table

    return str(placement_group_table(group).get("state"))


def _is_on_nodes(group: Any, ray_node_ids: list[str]) -> bool:
    """Check that a group is on exactly these nodes. A restarted node has a new id."""
    from ray.util.placement_group import placement_group_table

    node_by_bundle = placement_group_table(group).get("bundles_to_node_id", {})
    return [node_by_bundle.get(i) for i in range(len(ray_node_ids))] == ray_node_ids


def _wait_for_capacity(bundles: list[Resources], ray_node_ids: list[str]) -> None:
    """Wait until the nodes have the resources free. Raises NoCapacity after WAIT_S.

    Resources that an attempt gave back reach the head up to 0.1 s later, and Ray retries a group that did not fit only
    once a second. Polling before the group is requested is faster.
    """
    from ray._private.state import available_resources_per_node

    deadline = time.monotonic() + WAIT_S
    while not ray_capacity.fits(bundles, ray_node_ids, available_resources_per_node()):  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise ray_capacity.no_capacity(bundles, ray_node_ids)
        time.sleep(POLL_S)


def release_now(allocation_name: str) -> None:
    """Remove the group of these devices, if there is one.

    Does nothing if the caller has stopped waiting: the release is repeated, or the next attempt uses the group.
    """
    with _LOCKS.lock(allocation_name):
        group = _find(allocation_name)
        if group is not None and not RAY.is_late:
            _remove(group)
            _LOCKS.remove_newest(allocation_name)


def list_reserved_now() -> frozenset[str]:
    """Allocation names for which we have a group in this Ray cluster."""
    from ray.util.placement_group import placement_group_table

    prefix = _name("")
    rows = [row for row in placement_group_table().values() if row["state"] != "REMOVED"]
    return frozenset(row["name"].removeprefix(prefix) for row in rows if row["name"].startswith(prefix))


release = with_time_limit("release devices", LIMIT_S)(release_now)
list_reserved = with_time_limit("list reserved devices", LIMIT_S)(list_reserved_now)
