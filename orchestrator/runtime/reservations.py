"""Every allocation is backed by a Ray placement group, so that other users of the same Ray cluster are respected.

A group bears the name of its place (core/attempts.py), not of an attempt: the next attempt on the same devices takes it
over as it is.
"""

import threading
import time
from typing import Any

from cluster.identity import fleet_identity, reservation_prefix
from cluster.paths import home
from orchestrator.runtime import ray_capacity
from orchestrator.runtime.ray_calls import RAY, in_time
from orchestrator.runtime.ray_capacity import Resources

WAIT_S = 10.0
LOOK_EVERY_S = 0.005
LIMIT_S = 10.0
PENDING_S = 2.0
"""Ray tries a group that did not fit again every second."""


class _Places:
    """Who may change the reservation of a place: of one cluster, one call at a time, also those that are late, as after
    a head that did not answer. A reservation that came too late goes back, unless the next launch has taken it over.
    """

    def __init__(self) -> None:
        self._locks: dict[tuple[int, str], threading.Lock] = {}
        self._newest: dict[str, Any] = {}

    def alone(self, place: str) -> threading.Lock:
        """A call to a cluster that was left may never return, and keeps nobody in the next one waiting."""
        return self._locks.setdefault((RAY.cluster, place), threading.Lock())

    def handed_out(self, place: str, group: Any) -> None:
        self._newest[place] = group

    def forget(self, place: str) -> None:
        self._newest.pop(place, None)

    def came_late(self, group: Any) -> None:
        place = next((place for place, newest in list(self._newest.items()) if newest is group), None)
        if place is not None and not RAY.left:
            with self.alone(place):
                if self._newest.get(place) is group:
                    _remove(self._newest.pop(place))


_PLACES = _Places()


def _remove(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


@in_time("reserve devices", 2 * WAIT_S + LIMIT_S, given_up=_PLACES.came_late)
def reserve(place: str, bundles: list[Resources], ray_node_ids: list[str]) -> Any:
    """Hold `bundles[i]` on node i until released, whoever lives; what is held there already stays. Raises NoRoom
    when others hold them.
    """
    with _PLACES.alone(place):
        group = _reserve(place, bundles, ray_node_ids)
        _PLACES.handed_out(place, group)
        return group


def _reserve(place: str, bundles: list[Resources], ray_node_ids: list[str]) -> Any:
    """None where nobody waits for it any more: what is begun late would be removed while Ray is still at it, and Ray
    may then go on reserving its resources for nobody.
    """
    from ray.util.placement_group import placement_group

    held = _find(place)
    if RAY.late:
        return None
    if held is not None:
        if _settled(held) and _lies_on(held, ray_node_ids):
            return held
        _remove(held)
    _await_room(bundles, ray_node_ids)
    if RAY.late:
        return None
    selectors = [{"ray.io/node-id": node_id} for node_id in ray_node_ids]
    group = placement_group(
        bundles, strategy="PACK", lifetime="detached", name=_name(place), bundle_label_selector=selectors
    )
    if not group.wait(timeout_seconds=WAIT_S):
        _remove(group)
        raise ray_capacity.short(bundles, ray_node_ids)
    return group


def _name(place: str) -> str:
    return f"{reservation_prefix(fleet_identity(home()))}{place}"


def _find(place: str) -> Any:
    """By name: Ray's table keeps all that ever were."""
    from ray.util.placement_group import get_placement_group

    try:
        return get_placement_group(_name(place))
    except ValueError:
        return None


def _settled(group: Any) -> bool:
    """Whether it stands. One that a server before us began may still be under way."""
    return _state(group) == "CREATED" or (_state(group) == "PENDING" and bool(group.wait(timeout_seconds=PENDING_S)))


def _state(group: Any) -> str:
    from ray.util.placement_group import placement_group_table

    return str(placement_group_table(group).get("state"))


def _lies_on(group: Any, ray_node_ids: list[str]) -> bool:
    """A node that was started again has another id."""
    from ray.util.placement_group import placement_group_table

    lies = placement_group_table(group).get("bundles_to_node_id", {})
    return [lies.get(i) for i in range(len(ray_node_ids))] == ray_node_ids


def _await_room(bundles: list[Resources], ray_node_ids: list[str]) -> None:
    """What an attempt gave back reaches the head up to 0.1 s later, and Ray looks only once a second at a group that
    did not fit at first: so look ourselves, and ask when there is room. Raises NoRoom when there comes none.
    """
    from ray._private.state import available_resources_per_node

    deadline = time.monotonic() + WAIT_S
    while not ray_capacity.fits(bundles, ray_node_ids, available_resources_per_node()):  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise ray_capacity.short(bundles, ray_node_ids)
        time.sleep(LOOK_EVERY_S)


def give_back(place: str) -> None:
    """Nothing when it holds nothing, and where nobody waits for it any more: it is asked for again, or taken over."""
    with _PLACES.alone(place):
        group = _find(place)
        if group is not None and not RAY.late:
            _remove(group)
            _PLACES.forget(place)


def list_held() -> frozenset[str]:
    """The places of ours that are held in this Ray cluster."""
    from ray.util.placement_group import placement_group_table

    prefix = _name("")
    rows = [row for row in placement_group_table().values() if row["state"] != "REMOVED"]
    return frozenset(row["name"].removeprefix(prefix) for row in rows if row["name"].startswith(prefix))


release = in_time("release devices", LIMIT_S)(give_back)
held = in_time("list reserved devices", LIMIT_S)(list_held)
