"""Two placement groups on a Ray cluster of two nodes, nothing of ours: one is given back while the wall clock of Ray's
programs is an hour ahead, one after it was set back. Prints `free` or `kept` for each, as Ray tells after 10 s.
"""

import os
import struct
import time
from pathlib import Path

import ray
from ray._private.state import available_resources_per_node
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

HOUR_S = 3600
CLOCK = Path(os.environ["CHAOS_CLOCK"])
LITTLE = 80_000_000


def set_by(seconds: int) -> None:
    with CLOCK.open("r+b") as file:
        file.write(struct.pack("q", seconds))
    time.sleep(1)


def held() -> object:
    group = placement_group([{"CPU": 2.0}] * 2, strategy="SPREAD")
    assert group.wait(timeout_seconds=30)
    return group


def is_free(workers: list[str]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        free = available_resources_per_node()
        if all(free.get(node, {}).get("CPU") == 2.0 for node in workers):
            return True
        time.sleep(0.05)
    return False


cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": LITTLE}
)
try:
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=LITTLE)
    ray.init(cluster.address, log_to_driver=False)
    workers = [node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU")]
    set_by(HOUR_S)
    remove_placement_group(held())
    print("free" if is_free(workers) else "kept")
    group = held()
    set_by(0)
    remove_placement_group(group)
    print("free" if is_free(workers) else "kept")
    ray.shutdown()
finally:
    cluster.shutdown()
