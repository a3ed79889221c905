"""The RayCluster against KubeRay's own schema (tests/data/kuberay) and what Ray's autoscaler derives from it."""

import json
from pathlib import Path

import jsonschema
import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from cluster.errors import SpecError
from cluster.fleet.fleet_spec import parse_fleet
from cluster.input import strict_yaml
from cluster.render import kuberay
from cluster.render.shapes import ray_version

SCHEMA = json.loads((Path(__file__).parents[2] / "data" / "kuberay" / "raycluster.schema.json").read_text())
NODE = {"cpus": 96, "memory": "1800GB", "image": "registry.example/polyfleet:1"}
TPU = {"backend": "tpu", "cpus": 24, "memory": "200GB", "image": "registry.example/xla:1"}
HEAD = {"head": {"image": "registry.example/polyfleet:1"}}
GPU = "cloud.google.com/gke-accelerator"
TPU_LABELS = ("cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology")

# Pool; resources that Ray's autoscaler sees, beside CPU and memory; the pod's limits; node selector; taint tolerated.
VENDORS = {
    "nvidia": (
        NODE | {"backend": "nvidia", "accelerators": "H100-80GB:8", "min_nodes": 0, "max_nodes": 4},
        {"GPU": 8},
        {"nvidia.com/gpu": "8"},
        {GPU: "nvidia-h100-80gb"},
        ["nvidia.com/gpu"],
    ),
    "amd": (
        NODE | {"backend": "amd", "accelerators": "amd:MI300X:8", "nodes": 2},
        {"GPU": 8},
        {"amd.com/gpu": "8"},
        {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"},
        ["amd.com/gpu"],
    ),
    "intel": (
        NODE | {"backend": "intel", "accelerators": "intel:Max-1550:4"},
        {"GPU": 4},
        {"gpu.intel.com/xe": "4"},
        {"intel.feature.node.kubernetes.io/gpu": "true"},
        [],
    ),
    "neuron": (
        NODE | {"backend": "neuron", "accelerators": "neuron:trn1:32", "min_nodes": 0, "max_nodes": 2},
        {"neuron_cores": 32},
        {"aws.amazon.com/neuroncore": "32"},
        {"node.kubernetes.io/instance-type": "trn1.32xlarge"},
        ["aws.amazon.com/neuron"],
    ),
    "one-host-slice": (
        TPU | {"accelerators": "tpu:v6e:8", "topology": "2x4"},
        {"TPU": 8, "TPU-v6e-8-head": 1},
        {"google.com/tpu": "8"},
        dict(zip(TPU_LABELS, ("tpu-v6e-slice", "2x4"), strict=True)),
        ["google.com/tpu"],
    ),
    "slices": (
        TPU | {"accelerators": "tpu:v5e:4", "topology": "4x4", "min_nodes": 0, "max_nodes": 8},
        {"TPU": 4, "TPU-v5litepod-16-head": 1},
        {"google.com/tpu": "4"},
        dict(zip(TPU_LABELS, ("tpu-v5-lite-podslice", "4x4"), strict=True)),
        ["google.com/tpu"],
    ),
    "deep-slices": (
        TPU | {"accelerators": "tpu:v4:4", "topology": "2x2x4", "nodes": 4},
        {"TPU": 4, "TPU-v4-32-head": 1},
        {"google.com/tpu": "4"},
        dict(zip(TPU_LABELS, ("tpu-v4-podslice", "2x2x4"), strict=True)),
        ["google.com/tpu"],
    ),
    "cpu": (NODE | {"backend": "cpu"}, {}, {}, {}, []),
}


def documents(pools: dict, **kubernetes: object) -> tuple[dict, dict]:
    """The ConfigMap and the RayCluster of a fleet, as a strict reader sees them."""
    fleet = parse_fleet({"name": "lab", "pools": pools, "kubernetes": HEAD | kubernetes})
    text, _ = kuberay.render(fleet)
    assert kuberay.render(fleet)[0] == text, "the same file twice"
    settings, cluster = strict_yaml.load_all(text, "rendered")
    jsonschema.Draft202012Validator(SCHEMA).validate(cluster)
    return settings, cluster


def group(pool: dict, **kubernetes: object) -> dict:
    return documents({"p": pool}, **kubernetes)[1]["spec"]["workerGroupSpecs"][0]


def container(group: dict) -> dict:
    return group["template"]["spec"]["containers"][0]


def environment(group: dict) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container(group)["env"]}


@pytest.mark.parametrize("vendor", VENDORS)
def test_every_vendors_group_passes_kuberays_schema_and_rays_autoscaler_sees_its_devices(vendor: str):
    pool, devices, limits, selector, taints = VENDORS[vendor]
    _, cluster = documents({"p": pool})
    seen = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]["p"]
    memory = int(pool["memory"].removesuffix("GB")) * 10**9
    assert seen["resources"] == {"CPU": pool["cpus"], "memory": memory} | devices
    assert seen["labels"]["polyfleet.io/pool"] == "p"
    nodes = (pool.get("min_nodes", pool.get("nodes", 1)), pool.get("max_nodes", pool.get("nodes", 1)))
    assert (seen["min_workers"], seen["max_workers"]) == nodes
    pod = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    of_pod = pod["containers"][0]["resources"]
    assert of_pod["limits"] == of_pod["requests"]
    assert {k: v for k, v in of_pod["limits"].items() if k not in ("cpu", "memory")} == limits
    assert pod.get("nodeSelector", {}) == selector
    assert [toleration["key"] for toleration in pod.get("tolerations", [])] == taints


def test_all_vendors_stand_in_one_cluster_whose_autoscaler_runs_only_where_pools_can_grow():
    _, cluster = documents({name: pool for name, (pool, *_) in VENDORS.items()})
    assert cluster["spec"]["autoscalerOptions"] == {"version": "v2", "idleTimeoutSeconds": 300}
    seen = _derive_autoscaling_config_from_ray_cr(cluster)
    assert set(seen["available_node_types"]) == {"headgroup", *VENDORS}
    fixed = documents({"p": VENDORS["amd"][0]})[1]["spec"]
    assert fixed["enableInTreeAutoscaling"] is False and "autoscalerOptions" not in fixed


def test_a_slice_is_one_replica_of_as_many_hosts_as_it_has_chips_for():
    slices = group(VENDORS["slices"][0])
    assert (slices["numOfHosts"], slices["minReplicas"], slices["maxReplicas"]) == (4, 0, 2)
    assert group(VENDORS["one-host-slice"][0])["numOfHosts"] == 1


def test_what_kuberays_operator_refuses_is_not_written():
    """validation.go of 1.7.0: resources and labels belong to the group, never to rayStartParams too."""
    settings, cluster = documents({"p": VENDORS["nvidia"][0]})
    spec = cluster["spec"]
    for one in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        both = {"num-cpus", "num-gpus", "memory", "resources"} & set(one["rayStartParams"])
        assert not (both and one.get("resources")) and "labels" not in one["rayStartParams"]
    assert spec["rayVersion"] == ray_version() and "RAY_enable_autoscaler_v2" not in settings["data"]


def test_ray_wants_a_token_and_no_secret_stands_in_the_file():
    settings, cluster = documents({"p": NODE | {"backend": "cpu"}}, token_secret="ours")
    assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "ours"}
    head = cluster["spec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "dashboard-host": "127.0.0.1"}
    assert {"name": "ray-token", "secret": {"secretName": "ours"}} in head["template"]["spec"]["volumes"]
    assert not [key for key in settings["data"] if "TOKEN" in key]
    worker = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert worker["automountServiceAccountToken"] is False
    assert worker["containers"][0]["securityContext"] == {"allowPrivilegeEscalation": False}


def test_agents_are_told_their_pool_back_end_environment_and_the_storage_they_share():
    pool = NODE | {"backend": "amd", "accelerators": "MI300X:8", "env": {"NCCL_DEBUG": "WARN", "X": "$(HOME) no"}}
    _, cluster = documents({"rocm": pool, "cpu": NODE | {"backend": "cpu"}}, storage_claim="ckpt")
    rocm, cpu = cluster["spec"]["workerGroupSpecs"]
    assert environment(rocm) == {
        "NCCL_DEBUG": "WARN",
        "POLYFLEET_BACKEND": "amd",
        "POLYFLEET_ENVIRONMENT": rocm["labels"]["polyfleet.io/environment"],
        "POLYFLEET_LOCAL_POOLS": '{"cpu": "/polyfleet-storage/cpu"}',
        "POLYFLEET_NODE_DIR": "/polyfleet/node",
        "POLYFLEET_POOL": "rocm",
        "POLYFLEET_POOL_VARIABLES": "NCCL_DEBUG,X",
        "POLYFLEET_STORAGE": "/polyfleet-storage/rocm",
        "X": "$$(HOME) no",  # Kubernetes makes $(HOME) of it, and would else put a value there
    }
    for one in (rocm, cpu):
        mounted = {m["name"]: m["mountPath"] for m in container(one)["volumeMounts"]}
        assert mounted == {"polyfleet": "/polyfleet", "storage": "/polyfleet-storage"}


def test_pools_of_two_images_are_two_environments():
    _, cluster = documents({"a": NODE | {"backend": "cpu"}, "b": NODE | {"backend": "cpu", "image": "other:1"}})
    a, b = (g["labels"]["polyfleet.io/environment"] for g in cluster["spec"]["workerGroupSpecs"])
    assert a != b


def test_jobs_save_before_a_pod_ends_and_have_the_time_for_it():
    worker = group(NODE | {"backend": "cpu"})
    assert container(worker)["lifecycle"]["preStop"]["exec"]["command"] == [
        "python",
        "-m",
        "cluster.host.termination_notice",
    ]
    assert worker["template"]["spec"]["terminationGracePeriodSeconds"] == 60


def test_a_node_selector_of_the_user_takes_the_place_of_the_catalogues_but_gkes_two_of_a_slice():
    own = {"kubernetes": {"node_selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}}
    assert group(VENDORS["nvidia"][0] | own)["template"]["spec"]["nodeSelector"] == own["kubernetes"]["node_selector"]
    none = {"kubernetes": {"node_selector": {}}}
    assert "nodeSelector" not in group(VENDORS["nvidia"][0] | none)["template"]["spec"]
    assert group(VENDORS["slices"][0] | none)["template"]["spec"]["nodeSelector"] == VENDORS["slices"][3]


def test_spot_machines_are_asked_for_in_the_words_of_the_cloud_that_is_known():
    def selector(name: str, **more: object) -> dict[str, str]:
        return group(VENDORS[name][0] | {"spot": True, **more})["template"]["spec"]["nodeSelector"]

    assert selector("nvidia")["cloud.google.com/gke-spot"] == "true"
    assert selector("neuron")["eks.amazonaws.com/capacityType"] == "SPOT"
    own = {"node_selector": {"karpenter.sh/capacity-type": "spot"}}
    assert selector("amd", kubernetes=own) == own["node_selector"]
    with pytest.raises(SpecError, match=r"pools.p.kubernetes.node_selector: is required .* spot"):
        selector("amd")


def test_another_resource_of_a_device_plugin_is_counted_for_ray_all_the_same():
    old = VENDORS["intel"][0] | {"kubernetes": {"resource": "gpu.intel.com/i915"}}
    assert container(group(old))["resources"]["limits"]["gpu.intel.com/i915"] == "4"
    assert group(old)["resources"]["GPU"] == "4"


@pytest.mark.parametrize(
    "pool, field, remedy",
    [
        ({"backend": "nvidia"}, "pools.p.accelerators", "nvidia:H100-80GB:8"),
        (NODE | {"backend": "cpu", "cpus": None}, "pools.p.cpus", "e.g. 96"),
        (NODE | {"backend": "cpu", "memory": None}, "pools.p.memory", "1800GB"),
        (NODE | {"backend": "cpu", "image": ""}, "pools.p.image", "name a container image"),
        (NODE | {"backend": "apple", "accelerators": "apple:M4:1"}, "pools.p.kubernetes.resource", "kubectl describe"),
        (TPU | {"accelerators": "tpu:v5e:4"}, "pools.p.topology", "e.g. 1x1"),
        (TPU | {"accelerators": "tpu:v5e:4", "topology": "2x2x2"}, "pools.p.topology", "write it like 1x1"),
        (TPU | {"accelerators": "tpu:v5e:8", "topology": "4x4"}, "pools.p.accelerators", "write tpu:v5e:4"),
        (TPU | {"accelerators": "tpu:v5e:4", "topology": "4x4", "nodes": 6}, "pools.p.nodes", "write 4 or 8"),
        (TPU | {"accelerators": "tpu:v5e:4", "topology": "4x4", "max_nodes": 3}, "pools.p.max_nodes", "write 4"),
    ],
)
def test_what_a_pool_lacks_or_says_wrongly_is_named_with_what_to_write(pool: dict, field: str, remedy: str):
    with pytest.raises(SpecError) as told:
        group(pool)
    assert told.value.field == field
    assert remedy in told.value.remedy


def test_a_fleet_without_a_head_is_told_what_to_write():
    with pytest.raises(SpecError, match=r"kubernetes.head: is required .* write e.g. \{image"):
        kuberay.render(parse_fleet({"pools": {"p": NODE | {"backend": "cpu"}}}))


def test_who_renders_learns_what_the_file_cannot_know():
    lonely = parse_fleet({"pools": {"p": NODE | {"backend": "amd", "accelerators": "MI210:8"}}, "kubernetes": HEAD})
    assert [remark.partition(":")[0] for remark in kuberay.render(lonely)[1]] == [
        "without kubernetes.storage_claim, checkpoints are stored in pods and are lost with them",
        "pool p",
    ]
