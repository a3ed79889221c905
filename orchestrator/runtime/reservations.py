"""Every lease is backed by a Ray placement group, so that other users of the same Ray cluster are respected."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from cluster.catalogue import ray_resource
from cluster.errors import FleetError
from orchestrator.runtime.engine import in_time

WAIT_S = 10.0
LOOK_EVERY_S = 0.005
PREFIX = "polyfleet-attempt-"
LIMIT_S = 10.0
SMALLEST = 1e-4
"""Ray counts in ten-thousandths: shares of a CPU that do not come out even are rounded."""

Resources = dict[str, float]


def bundle(backend: str, emulated: bool, numbers: int, devices_of_node: int, cpus: float) -> Resources:
    """What `numbers` devices of one node cost in Ray's resources. A CPU device is its share of the node's CPUs."""
    resource = ray_resource(backend, emulated)
    return {"CPU": cpus / max(devices_of_node, 1) * numbers} if resource == "CPU" else {resource: float(numbers)}


def _remove(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


@in_time("reserve devices", 2 * WAIT_S + LIMIT_S, given_up=_remove)
def reserve(attempt: str, bundles: list[Resources], ray_node_ids: list[str]) -> Any:
    """Hold `bundles[i]` on node i until released, whoever lives. Raises FleetError when others hold them."""
    from ray.util.placement_group import placement_group

    _await_room(bundles, ray_node_ids)
    selectors = [{"ray.io/node-id": node_id} for node_id in ray_node_ids]
    group = placement_group(
        bundles, strategy="PACK", lifetime="detached", name=PREFIX + attempt, bundle_label_selector=selectors
    )
    if not group.wait(timeout_seconds=WAIT_S):
        _remove(group)
        raise _taken(bundles)
    return group


def _await_room(bundles: list[Resources], ray_node_ids: list[str]) -> None:
    """What an attempt gave back reaches the head up to 0.1 s later, and Ray looks only once a second at a group that
    did not fit at first: so look ourselves, and ask when there is room. Raises FleetError when there comes none.
    """
    from ray._private.state import available_resources_per_node

    deadline = time.monotonic() + WAIT_S
    while not fits(bundles, ray_node_ids, available_resources_per_node()):  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise _taken(bundles)
        time.sleep(LOOK_EVERY_S)


def fits(bundles: list[Resources], ray_node_ids: list[str], free: Mapping[str, Resources]) -> bool:
    """Whether every node has room for the sum of its bundles. `free` is by node; a dead one is not in it."""
    wanted: Counter[tuple[str, str]] = Counter()
    for node_id, bundle in zip(ray_node_ids, bundles, strict=True):
        wanted.update({(node_id, resource): amount for resource, amount in bundle.items()})
    return all(
        amount <= free.get(node_id, {}).get(resource, 0.0) + SMALLEST for (node_id, resource), amount in wanted.items()
    )


def _taken(bundles: list[Resources]) -> FleetError:
    return FleetError(f"another user of this Ray cluster holds the resources {bundles}", "they are tried again")


def give_back(attempt: str) -> None:
    """Give back what `attempt` holds; nothing when it holds nothing. By name: Ray's table keeps all that ever were."""
    from ray.util.placement_group import get_placement_group

    try:
        group = get_placement_group(PREFIX + attempt)
    except ValueError:
        return
    _remove(group)


def list_held() -> dict[str, Any]:
    """attempt -> its placement group, for all of ours that exist in this Ray cluster."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, placement_group_table

    groups = {}
    for group_id, row in placement_group_table().items():
        if row["name"].startswith(PREFIX) and row["state"] != "REMOVED":
            groups[row["name"].removeprefix(PREFIX)] = PlacementGroup(PlacementGroupID.from_hex(group_id))
    return groups


release = in_time("release devices", LIMIT_S)(give_back)
held = in_time("list reserved devices", LIMIT_S)(list_held)
