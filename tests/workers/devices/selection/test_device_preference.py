"""Which device is best, as data in and order out."""

import pytest

from cluster.errors import UserError
from cluster.types import Device
from workers.options.device_preference import best, ranked, title


def device(kind, **more):
    return Device(backend=kind.partition(":")[0], kind=kind, index=0, name=kind, **more)


def kinds(*names, **how):
    return [d.kind for d in ranked([device(name) for name in names], **how)]


def test_generations_come_in_the_order_users_expect_and_the_cpu_last():
    order = [
        "nvidia:H100-80GB",
        "tpu:v5p",
        "nvidia:A100-40GB",
        "tpu:v5e",
        "nvidia:T4",
        "nvidia:RTX-4090-24GB",
        "cpu",
    ]
    assert kinds(*reversed(order)) == order
    assert [d.kind for d in ranked([device(k) for k in ("tpu:v4", "amd:MI300X", "tpu:v6e", "nvidia:B200")])] == [
        "nvidia:B200",
        "tpu:v6e",
        "amd:MI300X",
        "tpu:v4",
    ]


@pytest.mark.parametrize(
    ("kind", "tier"),
    [
        ("nvidia:GH200-96GB", "Hopper and Blackwell"),
        ("nvidia:GB200", "Hopper and Blackwell"),
        ("nvidia:H100-80GB-MIG-1g.10gb", "Hopper and Blackwell"),
        ("amd:MI325X", "A100 and MI300 class"),
        ("amd:MI250X", "other data-centre accelerators"),
        ("neuron:trn2", "A100 and MI300 class"),
        ("intel:Arc-B580", "other GPUs"),
        ("apple:M4-Max", "other GPUs"),
        ("cpu:ipex", "CPU"),
    ],
)
def test_a_kind_belongs_to_a_generation(kind, tier):
    assert title(kind) == tier


def test_what_is_emulated_or_unusable_is_never_chosen_by_itself():
    there = [
        device("tpu:emulated", emulated=True),
        device("amd:gfx1036", unavailable_reason="integrated graphics"),
        device("cpu"),
    ]
    assert best(there).kind == "cpu"
    assert best(there[:2]) is None


def test_a_priority_of_back_ends_aliases_or_kinds_overrules_generations():
    there = ("nvidia:H100-80GB", "tpu:v5e", "cpu")
    assert kinds(*there, priority=["cpu", "xla"]) == ["cpu", "tpu:v5e", "nvidia:H100-80GB"]
    assert kinds(*there, priority=["tpu:v5e"])[0] == "tpu:v5e"
    with pytest.raises(UserError, match=r"unknown backend 'cudda'; did you mean 'cuda'\?"):
        kinds(*there, priority=["cudda"])


def test_measured_throughput_of_a_workload_overrules_generations_but_not_the_priority():
    there, measured = ("nvidia:H100-80GB", "tpu:v5e", "cpu"), {"tpu:v5e": 900.0, "nvidia:H100-80GB": 700.0}
    assert kinds(*there, workload=measured)[0] == "tpu:v5e"
    assert kinds(*there, workload=measured, priority=["nvidia"])[0] == "nvidia:H100-80GB"
    assert kinds(*there, workload={"cpu": 1.0})[0] == "cpu"  # an unmeasured kind promises nothing
