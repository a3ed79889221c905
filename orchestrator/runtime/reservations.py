"""Every lease is backed by a Ray placement group, so that other users of the same Ray cluster are respected."""

from typing import Any

from cluster.accelerators import ray_resource
from cluster.errors import FleetError

WAIT_S = 10.0
PREFIX = "polyfleet-attempt-"


def bundle(backend: str, emulated: bool, numbers: int, devices_of_node: int, cpus: float) -> dict[str, float]:
    """What `numbers` devices of one node cost in Ray's resources. A CPU device is its share of the node's CPUs."""
    resource = ray_resource(backend, emulated)
    return {"CPU": cpus / max(devices_of_node, 1) * numbers} if resource == "CPU" else {resource: float(numbers)}


def reserve(attempt: str, bundles: list[dict[str, float]], ray_node_ids: list[str]) -> Any:
    """Hold `bundles[i]` on node i until released, whoever lives. Raises FleetError when others hold them."""
    from ray.util.placement_group import placement_group, remove_placement_group

    selectors = [{"ray.io/node-id": node_id} for node_id in ray_node_ids]
    group = placement_group(
        bundles, strategy="PACK", lifetime="detached", name=PREFIX + attempt, bundle_label_selector=selectors
    )
    if not group.wait(timeout_seconds=WAIT_S):
        remove_placement_group(group)
        raise FleetError(f"another user of this Ray cluster holds the resources {bundles}", "they are tried again")
    return group


def release(attempt: str) -> None:
    """Give back what `attempt` holds; nothing when it holds nothing."""
    from ray.util.placement_group import remove_placement_group

    for name, group in held().items():
        if name == attempt:
            remove_placement_group(group)


def held() -> dict[str, Any]:
    """attempt -> its placement group, for all of ours that exist in this Ray cluster."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, placement_group_table

    groups = {}
    for group_id, row in placement_group_table().items():
        if row["name"].startswith(PREFIX) and row["state"] != "REMOVED":
            groups[row["name"].removeprefix(PREFIX)] = PlacementGroup(PlacementGroupID.from_hex(group_id))
    return groups
