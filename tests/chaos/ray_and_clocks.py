"""Ray alone, nothing of ours: what a step back of the wall clock of its programs, by an hour, keeps it from noticing.

A placement group is given back and a raylet is killed, before the step and after it. Prints `free` or `kept` and
`dead` or `alive` for each time, as Ray tells 10 s later of the group and half a minute later of the node, or more.
"""

import os
import struct
import time
from collections.abc import Callable
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
    assert group.wait(timeout_seconds=60)
    return group


def comes_true(truth: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if truth():
            return True
        time.sleep(0.05)
    return False


def is_free(workers: list[str]) -> bool:
    free = available_resources_per_node()
    return all(free.get(node, {}).get("CPU") == 2.0 for node in workers)


def given_back(group: object) -> str:
    remove_placement_group(group)
    return "free" if comes_true(lambda: is_free(workers), 10) else "kept"


def killed(node: object, within_s: float) -> str:
    cluster.remove_node(node, allow_graceful=False)
    return "dead" if comes_true(lambda: node.node_id not in living(), within_s) else "alive"


def living() -> list[str]:
    return [row["NodeID"] for row in ray.nodes() if row["Alive"]]


cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": LITTLE}
)
try:
    first, second = [cluster.add_node(num_cpus=2, object_store_memory=LITTLE) for _ in range(2)]
    others = [cluster.add_node(num_cpus=0, object_store_memory=LITTLE) for _ in range(2)]
    ray.init(cluster.address, log_to_driver=False)
    workers = [first.node_id, second.node_id]
    set_by(HOUR_S)
    print(given_back(held()), killed(others[0], 90))
    group = held()
    set_by(0)
    print(given_back(group), killed(others[1], 30))
    ray.shutdown()
finally:
    cluster.shutdown()
