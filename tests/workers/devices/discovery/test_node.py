import json
import os
import subprocess
import sys
from importlib.util import find_spec

import psutil
import pytest

from cluster.errors import UserError
from cluster.serialization import from_plain, to_plain
from cluster.types import Device, NodeFacts
from workers.devices.discovery import discover
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.resource_limits import cores, memory
from workers.devices.discovery.vendors import cpu
from workers.devices.discovery.versions import TorchBuild, mismatches, torch_build, versions
from workers.node.node_facts import node_facts, node_identity

MiB = 1 << 20


def test_the_tightest_group_decides_under_cgroup_v2(machine):
    here = machine("cgroup-v2")
    assert cores(here) == min(2, len(os.sched_getaffinity(0)))
    assert memory(here) == (1024 * MiB, (1024 - 600 + 100) * MiB)


def test_limits_are_read_from_inside_a_container_under_cgroup_v1(machine):
    here = machine("cgroup-v1")
    assert cores(here) == 1
    assert memory(here) == (512 * MiB, 384 * MiB)


def test_without_limits_the_machine_itself_is_the_limit(machine):
    here = machine("cgroup-unlimited")
    assert cores(here) == len(os.sched_getaffinity(0))
    assert memory(here)[0] == psutil.virtual_memory().total


def test_affinity_limits_the_cores_of_a_process():
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{one}])\nfrom workers.devices.discovery.resource_limits import cores\n"
    code += "from workers.devices.discovery.machine import Machine; print(cores(Machine()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_the_cpu_is_one_device_or_as_many_as_the_pool_says(tmp_path):
    (whole,), _ = cpu.find(Machine(tmp_path, {}))
    halves, _ = cpu.find(Machine(tmp_path, {"POLYFLEET_DEVICES": "2"}))
    assert whole.kind == "cpu"
    assert [d.index for d in halves] == [0, 1]
    assert halves[0].total_memory_bytes == whole.total_memory_bytes // 2


def test_an_ipex_pool_without_ipex_says_so_and_does_not_pass_for_plain_cpu(tmp_path):
    if find_spec("intel_extension_for_pytorch"):
        pytest.skip("IPEX is installed here")
    (device,), _ = cpu.find(Machine(tmp_path, {"POLYFLEET_CPU_ENGINE": "ipex"}))
    assert device.kind == "cpu:ipex"
    assert "intel-extension-for-pytorch is not installed in this environment" in device.unavailable_reason


def test_an_unknown_backend_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'nvidia'"):
        discover("nvdia")


def test_looking_for_devices_imports_no_torch():
    code = (
        "import sys; from workers.devices.discovery import discover; discover(); "
        "print({'torch', 'ray'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_versions_are_those_of_the_installed_packages():
    told = versions()
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["torch"].startswith("2.")
    assert torch_build() is not None


def _device(backend, **more):
    return Device(backend=backend, kind=f"{backend}:X", index=0, name="X", **more)


def test_hardware_that_this_torch_was_not_built_for_is_a_finding():
    found = mismatches([_device("amd"), _device("nvidia")], {"torch": "2.13.0"}, TorchBuild(cuda="13.0"))
    assert [f.message for f in found] == [
        "amd:X is present, but torch 2.13.0 in this environment is built for CUDA 13.0"
    ]
    (tpu,) = mismatches([_device("tpu")], {"torch": "2.13.0"}, TorchBuild())
    assert tpu.message == "tpu:X is present, but this environment has no torch-xla or torch_tpu"
    (cpu_only,) = mismatches([_device("nvidia")] * 2, {"torch": "2.13.0+cpu"}, TorchBuild())
    assert cpu_only.message == "nvidia:X is present, but torch 2.13.0+cpu in this environment is built for CPUs only"
    assert mismatches([_device("amd", unavailable_reason="integrated")], {"torch": "2.13.0"}, TorchBuild()) == []


def test_an_extension_for_another_torch_is_a_finding():
    (found,) = mismatches([], {"torch": "2.13.0+cpu", "torch-xla": "2.8.1"}, TorchBuild())
    assert found.message == "torch-xla 2.8.1 does not load under torch 2.13.0+cpu"
    assert mismatches([], {"torch": "2.8.0", "torch-xla": "2.8.1"}, TorchBuild()) == []


def test_node_facts_cross_as_json(tmp_path):
    here = node_identity("n0", "cpu", "cpu", tmp_path / "node", tmp_path)
    devices, findings = discover("cpu")
    facts = node_facts(here, devices, findings)
    assert from_plain(NodeFacts, json.loads(json.dumps(to_plain(facts)))) == facts
    assert (facts.pool, facts.storage, facts.agent_pid) == ("cpu", str(tmp_path), os.getpid())


def test_a_node_knows_its_place_from_the_variables_of_its_pool(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYFLEET_POOL", "xla")
    monkeypatch.setenv("POLYFLEET_NODE", "xla-0")
    monkeypatch.setenv("POLYFLEET_BACKEND", "tpu")
    monkeypatch.setenv("POLYFLEET_ENVIRONMENT", "torch28")
    monkeypatch.setenv("POLYFLEET_NODE_DIR", str(tmp_path / "n"))
    monkeypatch.setenv("POLYFLEET_STORAGE", str(tmp_path / "s"))
    here = node_identity(None, None, None, None, None)
    assert (here.pool, here.node, here.backend, here.environment) == ("xla", "xla-0", "tpu", "torch28")
    assert (here.node_dir, here.storage) == (tmp_path / "n", tmp_path / "s")


def test_a_node_of_somebody_elses_cluster_makes_a_place_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    here = node_identity("n0", None, "cpu", None, None)
    assert (here.pool, here.node_dir, here.storage) == ("cpu", tmp_path / "nodes/n0", tmp_path / "storage/cpu")
