"""What a fleet file may say to engines, and what it is told where it says it wrongly."""

from pathlib import Path

import pytest

from cluster.errors import SpecError
from cluster.fleet.fleet_spec import check_startable, load_fleet, parse_fleet
from cluster.render import kuberay, ray_autoscaler

EXAMPLE = Path(__file__).parents[3] / "examples" / "fleets" / "engines.yaml"
GPU = {"backend": "nvidia", "accelerators": "H100-80GB:8"}


def pool(**more: object):
    return parse_fleet({"pools": {"p": GPU | more}}).pools["p"]


@pytest.mark.parametrize("written", ["H100-80GB:8", "nvidia:h100-80gb:8", "cuda:H100-80GB:8", {"H100-80GB": 8}])
def test_devices_of_a_node_are_written_as_in_a_job(written):
    assert pool(accelerators=written).accelerators == "nvidia:H100-80GB:8"


def test_a_kind_without_a_number_is_one_device():
    assert pool(accelerators="L4").accelerators == "nvidia:L4:1"


def test_a_fleet_comes_back_from_its_plain_form_as_it_was():
    fleet = load_fleet(EXAMPLE)
    assert parse_fleet(fleet.model_dump(mode="json")) == fleet


def test_the_example_is_rendered_for_both_engines_that_it_is_for():
    fleet = load_fleet(EXAMPLE)
    for renderer in (kuberay, ray_autoscaler):
        text, _ = renderer.render(fleet)
        assert all(name in text for name in fleet.pools)


def test_up_takes_no_pool_that_says_something_to_engines_alone():
    for more in ({"accelerators": "H100:8"}, {"min_nodes": 0, "max_nodes": 2}, {"spot": True}, {"kubernetes": {}}):
        fleet = parse_fleet({"pools": {"here": {"backend": "cpu"}, "p": {"backend": "nvidia"} | more}})
        with pytest.raises(SpecError) as told:
            check_startable(fleet)
        assert told.value.field == f"pools.p.{next(iter(more))}"
        assert all(word in told.value.message for word in more)
    plain = parse_fleet({"pools": {"here": {"backend": "cpu", "nodes": 2}}, "slurm": {"folder": "/shared"}})
    assert check_startable(plain) is plain


@pytest.mark.parametrize(
    "more, field, said",
    [
        ({"accelerators": "H1000:8"}, "accelerators", "did you mean 'nvidia:H100"),
        ({"accelerators": "H100:0"}, "accelerators", "0 accelerators in one node"),
        ({"accelerators": "MI300X:8"}, "accelerators", "is not a kind of the back end nvidia"),
        ({"topology": "4x4"}, "topology", "only TPU slices have a topology"),
        ({"memory": "much"}, "memory", "is not a size; write a number and a unit"),
        ({"memory": 64}, "memory", "must be a valid string"),
        ({"cpus": 0}, "cpus", "greater than or equal to 1"),
        ({"min_nodes": 3, "max_nodes": 2}, "max_nodes", "must be at least min_nodes (3), got 2"),
        ({"min_nodes": 3}, "max_nodes", "write both, or `nodes` for a fixed number"),
        ({"nodes": 2, "max_nodes": 4}, "nodes", "is a fixed number"),
        ({"image": "a image"}, "image", "as for `docker pull`"),
        ({"image": "a:1\nb: c"}, "image", "is not an image"),
        ({"kubernetes": {"node_selectors": {}}}, "kubernetes.node_selectors", "did you mean 'node_selector'"),
        (
            {"kubernetes": {"node_selector": {"a b": "c"}}},
            "kubernetes.node_selector.a b",
            "is not a Kubernetes label key",
        ),
        ({"kubernetes": {"tolerations": [{"effect": "No"}]}}, "kubernetes.tolerations.0.effect", "unknown value 'No'"),
        ({"ray_autoscaler": {}}, "ray_autoscaler.node_config", "is required"),
    ],
)
def test_what_is_wrong_is_named_with_its_field(more: dict, field: str, said: str):
    with pytest.raises(SpecError) as told:
        pool(**more)
    assert told.value.field == f"pools.p.{field}"
    assert said in str(told.value)
