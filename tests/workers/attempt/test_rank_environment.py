import dataclasses
import os
import re
import sys
from pathlib import Path

import pytest

from workers.attempt.network_interfaces import interface_of_address
from workers.attempt.rank_environment import (
    CODE,
    POOL_VARIABLES,
    allowed_variables,
    rank_environment,
    supervisor_environment,
    threads_per_rank,
)
from workers.attempt.rank_variables import is_torchruns
from workers.protocol.messages import Order, ScriptCheckpoint

ORDER = Order(
    job="digits-3f9a2c", epoch=3, task="train", backend="nvidia", kind="nvidia:H200", emulated=False, devices=(2, 5),
    node_rank=1, nodes=2, first_rank=2, ranks=2, world_size=4, master_address="10.0.0.5", master_port=29400,
    checkpoint_root="/s/digits", resume_from="/s/digits/step-00000100-abcdef01",
)  # fmt: skip
FOLDER = Path("/n/shared/digits-3f9a2c.3.1")
OURS = {
    "POLYFLEET_ATTEMPT_DIR": str(FOLDER), "POLYFLEET_ATTEMPT": "digits-3f9a2c.3", "POLYFLEET_JOB": "digits-3f9a2c",
    "POLYFLEET_EPOCH": "3", "POLYFLEET_RANK": "3", "POLYFLEET_LOCAL_RANK": "1", "POLYFLEET_WORLD_SIZE": "4",
    "POLYFLEET_NODE_RANK": "1", "POLYFLEET_NODES": "2", "POLYFLEET_DEVICE_COUNT": "2",
    "POLYFLEET_MASTER_ADDR": "10.0.0.5", "POLYFLEET_MASTER_PORT": "29400",
    "POLYFLEET_BACKEND": "nvidia", "POLYFLEET_DEVICE_KIND": "nvidia:H200",
    "POLYFLEET_CHECKPOINT_DIR": "/s/digits", "POLYFLEET_RESUME_FROM": "/s/digits/step-00000100-abcdef01",
    "POLYFLEET_OUTPUT_DIR": "/s/digits/output-3",
}  # fmt: skip


def made(local_rank=0, environ=None, interface="", **changes):
    order = dataclasses.replace(ORDER, **changes)
    return rank_environment(order, local_rank, FOLDER, 3, environ or {}, interface=interface)


def test_a_rank_gets_exactly_these_variables():
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
    assert made(1) == {
        "PATH": path, "PYTHONPATH": str(CODE), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "ROLE_NAME": "default", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "digits-3f9a2c.3",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **OURS,
    }  # fmt: skip


def test_the_guide_has_a_row_for_each_variable_of_ours_and_for_no_other():
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "jobs.md").read_text()
    table = guide.split("Every process of a job, whatever its task, has these variables:")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`(POLYFLEET_\w+)`", cell)]
    assert sorted(names) == sorted([*OURS, "POLYFLEET_RESUME_PATH"])


def test_a_command_on_a_node_gets_ours_and_none_of_torchruns():
    found = made(task="run", command=("true",), ranks=1, first_rank=1, world_size=2)
    assert {name: value for name, value in found.items() if name.startswith("POLYFLEET_")} == OURS | {
        "POLYFLEET_RANK": "1", "POLYFLEET_LOCAL_RANK": "0", "POLYFLEET_WORLD_SIZE": "2",
    }  # fmt: skip
    assert not [name for name in found if is_torchruns(name) or name.startswith("TORCH_")]


def test_each_rank_of_a_command_sees_all_leased_devices_and_works_in_the_same_folder():
    ranks = [made(local, task="run", command=("true",), launch="ranks") for local in (0, 1)]
    assert [(r["RANK"], r["LOCAL_RANK"], r["CUDA_VISIBLE_DEVICES"]) for r in ranks] == [
        ("2", "0", "2,5"),
        ("3", "1", "2,5"),
    ]
    assert [r["PYTHONPATH"] for r in ranks] == [f"{FOLDER}/work/2"] * 2


def test_a_script_is_told_where_to_resume_only_where_there_is_something_to_resume():
    found = ScriptCheckpoint("run/ckpt.pt", found=True)
    assert made(task="run", command=("true",), arguments=found.to_plain())["POLYFLEET_RESUME_PATH"] == (
        "/s/digits/output-3/run/ckpt.pt"
    )
    nothing = found._replace(found=False)
    for changes in ({"arguments": nothing.to_plain(), "task": "run"}, {"arguments": found.to_plain()}):
        assert "POLYFLEET_RESUME_PATH" not in made(command=("true",), **changes)


def test_torchruns_variables_that_a_user_sets_reach_a_command_on_a_node():
    node = {"RANK": "7", POOL_VARIABLES: "RANK"}
    assert "RANK" not in made(environ=node, task="run", command=("true",), ranks=1)
    assert made(environ=node, task="run", command=("true",), ranks=1, environment={"RANK": "0"})["RANK"] == "0"


def test_on_a_cpu_frameworks_are_told_to_use_it_unless_pool_or_user_say_otherwise():
    on_cpu = {"backend": "cpu", "kind": "cpu"}
    told = {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
    assert told.items() <= made(**on_cpu).items()
    assert not told.keys() & made().keys()
    pool = {"ACCELERATE_USE_CPU": "false", POOL_VARIABLES: "ACCELERATE_USE_CPU"}
    assert made(environ=pool, **on_cpu)["ACCELERATE_USE_CPU"] == "false"
    assert made(environment={"DS_ACCELERATOR": "xpu"}, **on_cpu)["DS_ACCELERATOR"] == "xpu"


@pytest.mark.parametrize(
    ("backend", "kind", "has", "told"),
    [
        ("cpu", "cpu", True, "0"),
        ("cpu", "cpu:ipex", True, "0"),
        ("cpu", "cpu", False, None),
        ("tpu", "tpu:v5e", True, None),
    ],
)
def test_torch_xla_is_switched_off_where_it_is_installed_and_not_what_computes(backend, kind, has, told):
    order = dataclasses.replace(ORDER, backend=backend, kind=kind)
    assert rank_environment(order, 0, FOLDER, 3, {}, has_torch_xla=has).get("USE_TORCH_XLA") == told


@pytest.mark.parametrize(("written", "told"), [("bfloat16", "bf16"), ("half", "fp16"), ("fp32", "no"), ("", None)])
def test_a_jobs_precision_is_told_to_accelerate(written, told):
    assert made(precision=written).get("ACCELERATE_MIXED_PRECISION") == told


def test_of_the_nodes_own_variables_only_listed_ones_pass():
    kept = {
        "HOME": "/home/u",
        "LC_ALL": "C",
        "NCCL_DEBUG": "INFO",
        "PJRT_DEVICE": "CPU",
        "POLYFLEET_CPU_ENGINE": "ipex",
    }
    dropped = {
        "RAY_AUTH_TOKEN": "x", "RAY_AUTH_TOKEN_PATH": "x", "POLYFLEET_HOME": "x", "POLYFLEET_NODE_DIR": "x",
        "HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x", "NEURON_API_KEY": "x", "PYTHONSTARTUP": "x", "LD_PRELOAD": "x",
        "OMP_NUM_THREADS": "1", "CUDA_AUTH": "x",
    }  # fmt: skip
    found = allowed_variables(kept | dropped)
    found.pop("PATH")
    assert found == kept


def test_a_proxy_passes_unless_it_holds_a_password():
    found = allowed_variables(
        {"https_proxy": "http://proxy:3128", "http_proxy": "http://me:pw@proxy:3128", "NO_PROXY": "localhost"}
    )
    assert (found["https_proxy"], found["NO_PROXY"], "http_proxy" in found) == ("http://proxy:3128", "localhost", False)


def test_the_users_variables_win_over_the_nodes_and_ours_over_the_users():
    made_ = made(
        environ={"NCCL_DEBUG": "WARN"}, environment={"NCCL_DEBUG": "INFO", "RANK": "99", "OMP_NUM_THREADS": "7"}
    )
    assert (made_["NCCL_DEBUG"], made_["RANK"], made_["OMP_NUM_THREADS"]) == ("INFO", "2", "7")


def test_the_environments_own_python_comes_first_on_the_path():
    assert made(environ={"PATH": "/usr/bin"})["PATH"].split(os.pathsep) == [
        str(Path(sys.executable).parent),
        "/usr/bin",
    ]


def test_a_task_with_one_rank_per_node_sees_all_leased_devices():
    assert made(task="benchmark", ranks=1)["CUDA_VISIBLE_DEVICES"] == "2,5"


@pytest.mark.parametrize(
    ("backend", "devices", "shown"),
    [
        ("amd", (0, 1), {"HIP_VISIBLE_DEVICES": "0,1"}),
        ("intel", (3,), {"ZE_AFFINITY_MASK": "3", "ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}),
        ("tpu", (3,), {"TPU_VISIBLE_CHIPS": "3", "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1", "TPU_HOST_BOUNDS": "1,1,1"}),
        ("tpu", (0, 1), {"TPU_VISIBLE_CHIPS": "0,1", "TPU_CHIPS_PER_HOST_BOUNDS": "1,2,1"}),
        ("neuron", (0,), {"NEURON_RT_VISIBLE_CORES": "0"}),
    ],
)
def test_each_vendor_has_its_way_to_show_devices(backend, devices, shown):
    found = made(task="run", command=("true",), backend=backend, devices=devices, ranks=1)
    assert shown.items() <= found.items()


def test_a_mig_slice_is_shown_by_its_uuid_and_a_whole_card_by_its_number():
    found = made(task="run", command=("true",), devices=(1, 100), ranks=1, visibility_names={"100": "MIG-aaaa"})
    assert found["CUDA_VISIBLE_DEVICES"] == "1,MIG-aaaa"


@pytest.mark.parametrize(("backend", "emulated"), [("cpu", False), ("apple", False), ("tpu", True)])
def test_nothing_is_shown_or_hidden_where_there_is_nothing_to_choose(backend, emulated):
    assert not [name for name in made(backend=backend, emulated=emulated) if "VISIBLE" in name or "BOUNDS" in name]


def test_a_command_finds_its_own_folder_first_and_then_the_users_path():
    found = made(task="run", command=("true",), environment={"PYTHONPATH": "/mine"})
    assert found["PYTHONPATH"] == f"{FOLDER}/work/2{os.pathsep}/mine"


def test_ranks_on_one_machine_meet_on_its_loopback():
    interface = "lo0" if sys.platform == "darwin" else "lo"
    assert made(master_address="127.0.0.1", interface="eth0")["GLOO_SOCKET_IFNAME"] == interface
    assert "GLOO_SOCKET_IFNAME" not in made()


def named(**changes):
    found = made(interface="eth1", **changes)
    return {name: value for name, value in found.items() if "IFNAME" in name or "IFACE" in name}


def test_libraries_are_told_the_interface_that_has_the_nodes_address():
    common = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert named() == common
    assert named(backend="intel") == common | {"CCL_KVS_IFACE": "eth1", "FI_TCP_IFACE": "eth1"}
    assert named(backend="neuron") == common | {"CCOM_SOCKET_IFNAME": "eth1"}


def test_a_pool_or_a_job_that_names_an_interface_keeps_it():
    assert named(environ={"GLOO_SOCKET_IFNAME": "ib0"})["GLOO_SOCKET_IFNAME"] == "ib0"
    assert named(environ={"CCOM_SOCKET_IFNAME": "ib0"}, backend="neuron")["CCOM_SOCKET_IFNAME"] == "ib0"
    assert named(environment={"NCCL_SOCKET_IFNAME": "ib0"})["NCCL_SOCKET_IFNAME"] == "ib0"


CARDS = {
    "lo": ("127.0.0.1", "::1", "00:00:00:00:00:00"),
    "eth0": ("192.168.1.7", "02:00:0a:4d:00:01"),
    "eth1": ("10.0.0.7", "fe80::1%eth1", "02:00:0a:4d:00:02"),
    "docker0": ("172.17.0.1",),
}


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("10.0.0.7", "eth1"),
        ("192.168.1.7", "eth0"),
        ("127.0.0.1", "lo"),
        ("0:0:0:0:0:0:0:1", "lo"),
        ("fe80::1", "eth1"),
        ("203.0.113.9", ""),
        ("a-name", ""),
    ],
)
def test_the_interface_is_the_one_that_has_the_address(address, interface):
    assert interface_of_address(address, CARDS) == interface


def test_ranks_whose_libraries_start_a_compiler_at_once_go_without_unless_told_otherwise():
    assert made(backend="tpu", kind="tpu:emulated", emulated=True)["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert made(backend="cpu", kind="cpu:ipex")["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in made(backend="cpu", kind="cpu")
    asked = {"TORCHINDUCTOR_COMPILE_THREADS": "8"}
    assert made(backend="tpu", kind="tpu:v5e", environ=asked)["TORCHINDUCTOR_COMPILE_THREADS"] == "8"


def test_the_supervisors_environment_is_next_to_nothing():
    told = supervisor_environment({"PATH": "/usr/bin", "RAY_AUTH_TOKEN": "x", "HOME": "/h"})
    assert told == {"PATH": "/usr/bin", "PYTHONPATH": str(CODE), "LC_ALL": "C.UTF-8"}


@pytest.mark.parametrize(
    ("cores", "devices_of_node", "leased", "ranks", "threads"),
    [
        (16, 4, 1, 1, 4),
        (16, 4, 4, 4, 4),
        (2, 1, 1, 1, 2),
        (2, 2, 1, 1, 1),
        (2, 2, 2, 2, 1),
        (2, 8, 1, 1, 1),
        (16, 0, 1, 1, 16),
    ],
)
def test_cores_are_shared_by_devices_and_then_by_ranks(cores, devices_of_node, leased, ranks, threads):
    order = dataclasses.replace(ORDER, devices=tuple(range(leased)), ranks=ranks)
    assert threads_per_rank(cores, devices_of_node, order) == threads
