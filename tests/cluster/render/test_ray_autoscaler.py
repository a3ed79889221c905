"""The cluster launcher's file against Ray's own reader of it, and its commands as bash runs them."""

import os
import subprocess

import pytest
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.errors import SpecError
from cluster.fleet.fleet_spec import parse_fleet
from cluster.input import strict_yaml
from cluster.render import ray_autoscaler

AWS = {"provider": {"type": "aws", "region": "us-west-2"}, "head": {"node_config": {"InstanceType": "m7i.xlarge"}}}
POOLS = {
    "h100": {"backend": "nvidia", "accelerators": "H100-80GB:8", "cpus": 192, "min_nodes": 0, "max_nodes": 4,
             "environment": {"requirements": ["torch==2.9.0"]},
             "ray_autoscaler": {"node_config": {"InstanceType": "p5.48xlarge"}}},
    "trn": {"backend": "neuron", "accelerators": "trn1:32", "cpus": 128, "nodes": 2,
            "ray_autoscaler": {"node_config": {"InstanceType": "trn1.32xlarge"}}},
    "tpu": {"backend": "tpu", "accelerators": "tpu:v5e:4", "topology": "2x2", "cpus": 112,
            "ray_autoscaler": {"node_config": {"acceleratorType": "v5litepod-4", "runtimeVersion": "x"}}},
    "mi300x": {"backend": "amd", "accelerators": "MI300X:8", "cpus": 96, "ray_autoscaler": {"node_config": {"a": 1}}},
    "max": {"backend": "intel", "accelerators": "Max-1550:4", "cpus": 96, "ray_autoscaler": {"node_config": {"a": 1}}},
    "cpu": {"backend": "cpu", "cpus": 8, "ray_autoscaler": {"node_config": {"InstanceType": "m7i.2xlarge"}}},
}  # fmt: skip


def rendered(pools: dict, **more: object) -> dict:
    fleet = parse_fleet({"name": "lab", "pools": pools, "ray_autoscaler": AWS | more})
    text, _ = ray_autoscaler.render(fleet)
    assert ray_autoscaler.render(fleet)[0] == text, "the same file twice"
    return strict_yaml.load(text, "rendered")


@pytest.mark.parametrize("provider", ["aws", "gcp"])
def test_rays_launcher_takes_the_file_with_every_vendors_nodes(provider: str):
    region = {"region": "us-west1", "availability_zone": "us-west1-a", "project_id": "lab"}
    config = prepare_config(rendered(POOLS, provider={"type": provider, **region}))
    validate_config(config)
    types = config["available_node_types"]
    assert {name: types[name]["resources"] for name in POOLS} == {
        "h100": {"CPU": 192, "GPU": 8},
        "trn": {"CPU": 128, "neuron_cores": 32},
        "tpu": {"CPU": 112, "TPU": 4},
        "mi300x": {"CPU": 96, "GPU": 8},
        "max": {"CPU": 96, "GPU": 4},
        "cpu": {"CPU": 8},
    }
    assert {name: (types[name]["min_workers"], types[name]["max_workers"]) for name in ("h100", "trn")} == {
        "h100": (0, 4),
        "trn": (2, 2),
    }
    assert all(types[name]["labels"]["polyfleet.io/pool"] == name for name in POOLS)
    assert config["max_workers"] == 10 and config["head_node_type"] == "head"


def test_the_head_has_a_token_no_dashboard_and_no_work():
    config = rendered({"cpu": POOLS["cpu"]})
    assert config["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    start = config["head_start_ray_commands"][-1]
    assert "RAY_AUTH_MODE=token" in start and "--num-cpus=0" in start and "--include-dashboard=false" in start
    assert config["available_node_types"]["head"]["resources"] == {"CPU": 0}
    assert all("RAY_AUTH_MODE=token" in config[f"{role}_start_ray_commands"][-1] for role in ("head", "worker"))
    assert all("chmod 600 ~/.ray/auth_token" in config[f"{role}_start_ray_commands"][-1] for role in ("head", "worker"))


@pytest.mark.parametrize("cloud, library", [("aws", "boto3"), ("gcp", "google-api-python-client"), ("external", "")])
def test_the_head_gets_the_library_of_its_cloud_as_rays_own_file_has_it(cloud: str, library: str):
    def setup(**more: object) -> str:
        return "\n".join(rendered({"cpu": POOLS["cpu"]}, provider={"type": cloud}, **more)["head_setup_commands"][:-1])

    assert library in setup() and "polyfleet==" in setup()
    assert setup(head={"node_config": {}, "setup_commands": ["mine"]}) == "mine"
    assert "polyfleet==" not in setup(head_image="head:1")


def test_a_provider_that_ray_knows_no_defaults_for_finds_every_key_it_reads():
    """Of an external one Ray fills nothing in."""
    config = prepare_config(rendered(POOLS, provider={"type": "external", "module": "a.B"}))
    validate_config(config)


def test_a_nodes_own_setup_tells_its_agent_the_pool_whatever_stands_in_the_pools_variables(tmp_path):
    nasty = "'; touch broken; echo \"$(id)\" `id` \\ %s 'x"
    pool = POOLS["cpu"] | {"env": {"NASTY": nasty}, "labels": {"rack": "a1"}}
    kind = rendered({"cpu": pool})["available_node_types"]["cpu"]
    assert kind["labels"]["rack"] == "a1"
    own = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-c", kind["worker_setup_commands"][-1]], env=own, cwd=tmp_path, check=True)
    printed = subprocess.run(
        ["bash", "-c", ". ~/.polyfleet-node/env; printenv NASTY POLYFLEET_POOL POLYFLEET_BACKEND POLYFLEET_NODE_DIR"],
        env=own, cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert printed.stdout.splitlines() == [nasty, "cpu", "cpu", f"{tmp_path}/.polyfleet-node/node"]
    assert [path.name for path in tmp_path.iterdir()] == [".polyfleet-node"]
    assert (tmp_path / ".polyfleet-node" / "env").stat().st_mode & 0o077 == 0


def test_requirements_are_installed_unless_an_image_or_commands_of_the_user_have_them():
    def installing(**more: object) -> str:
        kind = rendered({"h100": POOLS["h100"] | more}, head_image="head:1")["available_node_types"]["h100"]
        return "\n".join(kind["worker_setup_commands"][:-1])

    assert "polyfleet==" in installing() and "torch==2.9.0" in installing()
    own = {"ray_autoscaler": {"node_config": {"a": 1}, "setup_commands": ["conda activate mine"]}}
    assert installing(**own) == "conda activate mine"
    assert installing(image="cuda:1") == ""


def test_images_are_for_all_nodes_or_none():
    pools = {"cpu": POOLS["cpu"] | {"image": "cpu:1"}, "trn": POOLS["trn"] | {"image": "trn:1"}}
    config = rendered(pools, head_image="head:1")
    assert config["docker"]["image"] == "head:1"
    assert config["available_node_types"]["trn"]["docker"] == {"worker_image": "trn:1"}
    for given, field in (({}, "ray_autoscaler.head_image"), ({"head_image": "head:1"}, "pools.trn.image")):
        with pytest.raises(SpecError) as told:
            rendered({"cpu": pools["cpu"], "trn": POOLS["trn"]}, **given)
        assert told.value.field == field


@pytest.mark.parametrize(
    "pool, more, field, said",
    [
        (POOLS["cpu"] | {"cpus": None}, {}, "pools.p.cpus", "is required"),
        (POOLS["cpu"] | {"ray_autoscaler": None}, {}, "pools.p.ray_autoscaler", "is required"),
        (POOLS["tpu"] | {"topology": "4x4", "nodes": 4}, {}, "pools.p.topology", "starts no slices of 4 machines"),
        (POOLS["cpu"], {"head": None}, "ray_autoscaler.head", "is required"),
        (POOLS["cpu"], {"provider": {"region": "us-west-2"}}, "ray_autoscaler.provider", "'type' is a required"),
        (POOLS["cpu"], {"provider": {"type": 1}}, "ray_autoscaler.provider.type", "not of type 'string'"),
        (POOLS["cpu"], {"auth": {"ssh_users": "me"}}, "ray_autoscaler.auth", "ssh_users"),
        (
            POOLS["cpu"],
            {"provider": {"type": "gcp", "gcp_credentials": {"type": "service_account", "credentials": "{}"}}},
            "ray_autoscaler.provider",
            "would be in the rendered file",
        ),
        (POOLS["cpu"], {"provider": {"type": "aws", "x": "y" * 20_000}}, "ray_autoscaler.provider", "at most 16384"),
    ],
)
def test_what_the_launcher_lacks_or_ray_refuses_is_named(pool: dict, more: dict, field: str, said: str):
    with pytest.raises(SpecError) as told:
        rendered({"p": pool}, **more)
    assert told.value.field == field
    assert said in told.value.message
