"""Every allocation is backed by a Ray placement group, so that other users of the same Ray cluster are respected.

A group bears the name of its place (core/attempts.py), not of an attempt: the next attempt on the same devices takes it
over as it is.
"""

import time
from typing import Any

from cluster.identity import fleet_identity, reservation_prefix
from cluster.paths import home
from orchestrator.runtime import room
from orchestrator.runtime.engine import in_time
from orchestrator.runtime.room import Resources

WAIT_S = 10.0
LOOK_EVERY_S = 0.005
LIMIT_S = 10.0


def _remove(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


@in_time("reserve devices", 2 * WAIT_S + LIMIT_S, given_up=_remove)
def reserve(place: str, bundles: list[Resources], ray_node_ids: list[str]) -> Any:
    """Hold `bundles[i]` on node i until released, whoever lives; what is held there already stays. Raises NoRoom
    when others hold them.
    """
    from ray.util.placement_group import placement_group

    if (held := _find(place)) is not None:
        if _lies_on(held, ray_node_ids):
            return held
        _remove(held)
    _await_room(bundles, ray_node_ids)
    selectors = [{"ray.io/node-id": node_id} for node_id in ray_node_ids]
    group = placement_group(
        bundles, strategy="PACK", lifetime="detached", name=_name(place), bundle_label_selector=selectors
    )
    if not group.wait(timeout_seconds=WAIT_S):
        _remove(group)
        raise room.short(bundles, ray_node_ids)
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


def _lies_on(group: Any, ray_node_ids: list[str]) -> bool:
    """A node that was started again has another id."""
    from ray.util.placement_group import placement_group_table

    row = placement_group_table(group)
    lies = row.get("bundles_to_node_id", {})
    return row.get("state") == "CREATED" and [lies.get(i) for i in range(len(ray_node_ids))] == ray_node_ids


def _await_room(bundles: list[Resources], ray_node_ids: list[str]) -> None:
    """What an attempt gave back reaches the head up to 0.1 s later, and Ray looks only once a second at a group that
    did not fit at first: so look ourselves, and ask when there is room. Raises NoRoom when there comes none.
    """
    from ray._private.state import available_resources_per_node

    deadline = time.monotonic() + WAIT_S
    while not room.fits(bundles, ray_node_ids, available_resources_per_node()):  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise room.short(bundles, ray_node_ids)
        time.sleep(LOOK_EVERY_S)


def give_back(place: str) -> None:
    """Nothing when it holds nothing."""
    if (group := _find(place)) is not None:
        _remove(group)


def list_held() -> frozenset[str]:
    """The places of ours that are held in this Ray cluster."""
    from ray.util.placement_group import placement_group_table

    prefix = _name("")
    rows = [row for row in placement_group_table().values() if row["state"] != "REMOVED"]
    return frozenset(row["name"].removeprefix(prefix) for row in rows if row["name"].startswith(prefix))


release = in_time("release devices", LIMIT_S)(give_back)
held = in_time("list reserved devices", LIMIT_S)(list_held)
