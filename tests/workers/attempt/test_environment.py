import dataclasses
import os
import sys
from pathlib import Path

import pytest

from workers.attempt.environment import CODE, inherited, rank_environment, supervisor_environment, threads_per_rank
from workers.messages import Order

ORDER = Order(
    job="digits-3f9a2c", epoch=3, task="train", backend="nvidia", kind="nvidia:H200", emulated=False, devices=(2, 5),
    node_rank=1, nodes=2, first_rank=2, ranks=2, world_size=4, master_address="10.0.0.5", master_port=29400,
    checkpoint_root="/s/digits", resume_from="/s/digits/step-00000100-abcdef01",
)  # fmt: skip
FOLDER = Path("/n/shared/digits-3f9a2c.3.1")


def made(local_rank=0, environ=None, **changes):
    return rank_environment(dataclasses.replace(ORDER, **changes), local_rank, FOLDER, 3, environ or {})


def test_a_rank_gets_exactly_these_variables():
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
    assert made(1) == {
        "PATH": path, "PYTHONPATH": str(CODE), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "3",
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "digits-3f9a2c.3",
        "CUDA_VISIBLE_DEVICES": "5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "POLYFLEET_ATTEMPT_DIR": str(FOLDER), "POLYFLEET_ATTEMPT": "digits-3f9a2c.3", "POLYFLEET_JOB": "digits-3f9a2c",
        "POLYFLEET_EPOCH": "3", "POLYFLEET_BACKEND": "nvidia", "POLYFLEET_DEVICE_KIND": "nvidia:H200",
        "POLYFLEET_CHECKPOINT_DIR": "/s/digits", "POLYFLEET_RESUME_FROM": "/s/digits/step-00000100-abcdef01",
    }  # fmt: skip


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
    found = inherited(kept | dropped)
    found.pop("PATH")
    assert found == kept


def test_a_proxy_passes_unless_it_holds_a_password():
    found = inherited(
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
    found = made(task="run", command=("true",), devices=(1, 100), ranks=1, visible_as={"100": "MIG-aaaa"})
    assert found["CUDA_VISIBLE_DEVICES"] == "1,MIG-aaaa"


@pytest.mark.parametrize(("backend", "emulated"), [("cpu", False), ("apple", False), ("tpu", True)])
def test_nothing_is_shown_or_hidden_where_there_is_nothing_to_choose(backend, emulated):
    assert not [name for name in made(backend=backend, emulated=emulated) if "VISIBLE" in name or "BOUNDS" in name]


def test_a_command_finds_its_own_folder_first_and_then_the_users_path():
    found = made(task="run", command=("true",), environment={"PYTHONPATH": "/mine"})
    assert found["PYTHONPATH"] == f"{FOLDER}/work/2{os.pathsep}/mine"


def test_ranks_on_one_machine_meet_on_its_loopback():
    interface = "lo0" if sys.platform == "darwin" else "lo"
    assert made(master_address="127.0.0.1")["GLOO_SOCKET_IFNAME"] == interface
    assert "GLOO_SOCKET_IFNAME" not in made()


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
