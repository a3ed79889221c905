"""A cluster that Ray's autoscaler grows: a job waits, a node is started for it, runs it, and is given back.

The autoscaler and the nodes are Ray's own; Ray's fake provider starts each "machine" as a raylet of this one. Its cloud
has none of one pool.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private.services import get_node_ip_address

from cluster.environments import code_export
from cluster.errors import SpecError
from cluster.fleet.fleet_spec import load_fleet
from cluster.host import tokens
from cluster.host.processes import free_port, is_alive, start_detached, stop
from cluster.input import strict_yaml
from cluster.nodes.ray_node import node_environment, token_environment
from cluster.render import ray_autoscaler
from orchestrator import Orchestrator, RunJob

pytestmark = pytest.mark.full

HEAD_ID = "f" * 51 + "00000"
FLEET = """
name: grows
pools:
  sold-out:
    {backend: cpu, cpus: 2, memory: 64GB, min_nodes: 0, max_nodes: 1, start_timeout_s: 3,
     ray_autoscaler: {node_config: {}}}
  grown:
    backend: cpu
    cpus: 2
    memory: 64GB
    price_per_hour: 1.5
    min_nodes: 0
    max_nodes: 1
    keep_idle_s: 1
    ray_autoscaler: {node_config: {}}
ray_autoscaler:
  idle_timeout_s: 1
  head: {node_config: {}}
  provider: {type: external, module: %s, gcs_address: "%s", head_node_id: %s, launch_multiple: true}
"""
CLOUD = """
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

class Cloud(FakeMultiNodeProvider):
    def create_node_with_resources_and_labels(self, node_config, tags, count, resources, labels):
        if labels["polyfleet.io/pool"] == "sold-out":
            raise RuntimeError("InsufficientInstanceCapacity")
        super().create_node_with_resources_and_labels(node_config, tags, count, resources, labels)
"""


def autoscaling_config(fleet: Path) -> str:
    """As we render it for `ray up`, with the name that the fake provider gives its head."""
    config = strict_yaml.load(ray_autoscaler.render(load_fleet(fleet))[0], "rendered")
    config["available_node_types"]["ray.head.default"] = config["available_node_types"].pop("head")
    return json.dumps(config | {"head_node_type": "ray.head.default"})


@pytest.fixture
def growing_ray(tmp_path: Path) -> Iterator[tuple[str, Path, Path]]:
    """Address, token and fleet file of a cluster that has a head, an autoscaler, and no other node yet."""
    address, token = f"{get_node_ip_address()}:{free_port()}", tokens.create_token(tmp_path / "their-token")
    fleet, config, log = tmp_path / "fleet.yaml", tmp_path / "autoscaler.yaml", tmp_path / "ray.log"
    fleet.write_text(FLEET % ("cloud_of_a_test.Cloud", address, HEAD_ID))
    (tmp_path / "cloud_of_a_test.py").write_text(CLOUD)
    config.write_text(autoscaling_config(fleet))
    told = {"RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_ID}
    told |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID, "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    told |= {"POLYFLEET_HOME": str(tmp_path), "POLYFLEET_POOL": "grown", "POLYFLEET_BACKEND": "cpu"}
    env = node_environment(token, code_export.export(), {"autoscaler": free_port(), "dashboard": free_port()}, told)
    env.pop("RAY_START_HOOK")
    env["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    with tempfile.TemporaryDirectory(prefix="pf-t-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        host, port = address.split(":")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
                   f"--node-ip-address={host}", f"--temp-dir={temp}", "--num-cpus=0", "--num-gpus=0",
                   "--include-dashboard=false", "--include-log-monitor=false", f"--object-store-memory={128 << 20}",
                   "--dashboard-agent-listen-port=0", "--labels=polyfleet.io/role=head",
                   f"--autoscaling-config={config}"]  # fmt: skip
        head = start_detached(command, env=env, cwd=tmp_path, log=log)
        try:
            while b"Ray runtime started" not in log.read_bytes():
                assert is_alive(head), log.read_text()
                time.sleep(0.05)
            yield address, token, fleet
        finally:
            stop([head], grace_s=2.0)


ASKED = """
import sys
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
for constraint in get_cluster_resource_state(GcsClient(sys.argv[1])).cluster_resource_constraints:
    for request in constraint.resource_requests:
        for selector in request.request.label_selectors:
            print(*(value for rule in selector.label_constraints for value in rule.label_values))
"""


def asked_for(address: str, token: Path) -> list[str]:
    """The pools of the nodes that Ray's autoscaler is asked for, as its head has it."""
    env = os.environ | token_environment(token)
    done = subprocess.run([sys.executable, "-c", ASKED, address], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_node_is_started_for_a_job_that_waits_where_one_can_be_had_and_is_given_back(
    growing_ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until
):
    address, token, fleet = growing_ray
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with Orchestrator.up(fleet, address=address) as o:
        try:
            assert o.inventory() == [], "no node is up, and none is needed"
            with pytest.raises(
                SpecError, match=r"in pool grown: costs 1\.5 per device and hour, but the job pays at most 1"
            ):
                o.submit(RunJob(command="true", resources={"pool": "grown", "max_price": 1}))
            stuck = o.submit(RunJob(command="true", resources={"pool": "sold-out"}))
            job = o.submit(
                RunJob(command="echo grown", resources={"ordered": [{"pool": "sold-out"}, {"pool": "grown"}]})
            )
            why = "pool sold-out is unavailable: no node came within 3 s (a launch failed; the log of Ray"
            until(lambda: why in stuck.view["reason"] and why in json.dumps(stuck.explain()))
            stuck.cancel()
            job.wait()
            until(lambda: o.inventory() == [])
            assert str(job.logs()) == "grown", "kept before its node was given back"
            until(lambda: asked_for(address, token) == [])
            o.submit(RunJob(command="sleep 300"))
            until(lambda: asked_for(address, token) == ["grown"])
            with Orchestrator.up(address=address):
                pools = [pool["pool"] for pool in o.fleet.show()["pools"]]
            assert pools == ["grown", "sold-out"], "without its file, it grows as before"
        finally:
            o.down()
    assert asked_for(address, token) == []
