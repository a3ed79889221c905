"""What vendors' own tools add to sysfs, and what they cost when they hang or lie. The tools are real child scripts."""

import json
import os
from pathlib import Path

import pytest
from patience import sufficient_limit
from python_scripts import SHEBANG

from cluster.types import Device
from workers.devices.capability.hardware import HardwareDetector
from workers.devices.capability.traits import traits
from workers.devices.discovery import discover
from workers.devices.discovery.machine import Machine, sysfs_address
from workers.devices.discovery.machine_findings import import_failures
from workers.devices.discovery.vendor_probe import probe
from workers.devices.discovery.vendors import amd, amd_smi, intel, intel_smi

GiB = 1 << 30
CARD = {"device_id": 0, "pci_bdf_address": "0000:03:00.0"}
DETAILS = {
    **CARD,
    "device_name": "Intel(R) Arc(TM) A770 Graphics",
    "driver_version": "I915_23.10.72",
    "memory_physical_size_byte": "17079205888",
    "memory_free_size_byte": "16000000000",
}


@pytest.fixture
def with_tool(tmp_path):
    """with_tool(machine, "xpu-smi", code) is that machine with a Python program of this name on its path."""

    def add(machine, name, code):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"{SHEBANG}import sys, time\n{code}\n")
        tool.chmod(0o755)
        return Machine(machine.root, {**machine.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"})

    return add


def xpu_smi(details=DETAILS):
    return f"print({json.dumps(details)!r} if '-d' in sys.argv else {json.dumps({'device_list': [CARD]})!r})"


def test_xpu_smi_adds_name_driver_and_free_memory(machine, with_tool):
    here = with_tool(machine("intel-arc-and-integrated"), "xpu-smi", xpu_smi())
    inside, card = intel.find(here)[0]
    assert (card.name, card.driver_version) == ("Intel(R) Arc(TM) A770 Graphics", "I915_23.10.72")
    assert (card.total_memory_bytes, card.free_memory_bytes) == (17079205888, 16000000000)
    assert inside.unified_memory and 0 < inside.free_memory_bytes <= inside.total_memory_bytes  # of this machine


def test_xpu_smi_tells_the_memory_that_the_kernels_driver_does_not(machine, with_tool):
    here = with_tool(machine("intel-arc-and-integrated"), "xpu-smi", xpu_smi())
    here.path("sys/class/drm/card0/lmem_total_bytes").unlink()
    assert intel.find(here)[0][1].total_memory_bytes == 17079205888
    assert intel.find(Machine(here.root, {}))[0][1].total_memory_bytes is None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('Error: XPUM Service Status Error')", "printed 'Error: XPUM Service Status Error', which is not JSON"),
        ("raise SystemExit('no Level Zero')", "exited with code 1: no Level Zero"),
        ("sys.stdout.buffer.write(bytes(range(256)))", "which is not JSON"),
    ],
)
def test_a_broken_xpu_smi_costs_one_finding_and_no_card(machine, with_tool, code, said):
    devices, (finding,) = intel.find(with_tool(machine("intel-max-1550"), "xpu-smi", code))
    assert [d.total_memory_bytes for d in devices] == [64 * GiB, 64 * GiB]
    assert (finding.level, finding.message.startswith("details of cards come from sysfs only: ")) == ("info", True)
    assert said in finding.message
    assert finding.remedy


def test_an_xpu_smi_that_hangs_is_killed_and_costs_no_card(machine, with_tool, monkeypatch):
    monkeypatch.setattr(intel_smi, "CALL_TIMEOUT_S", 0.3)
    devices, (finding,) = intel.find(with_tool(machine("intel-max-1550"), "xpu-smi", "time.sleep(600)"))
    assert len(devices) == 2
    assert "xpu-smi did not finish within 0.3 s" in finding.message


def test_a_hanging_tool_of_one_vendor_leaves_the_others_alone(machine, with_tool):
    here = with_tool(machine("neuron-trn1"), "neuron-ls", "time.sleep(600)")
    card = here.path("sys/bus/pci/devices/0000:c1:00.0")
    card.mkdir(parents=True)
    for name, text in (("vendor", "0x1002"), ("device", "0x74a1"), ("class", "0x038000")):
        (card / name).write_text(text)
    _, results = sufficient_limit(
        lambda s: probe(["neuron", "amd"], here, s),
        lambda r: "did not finish" not in r[1][1][0].message,
        range(2, 40, 4),  # steps of less than TOOL_TIMEOUT_S: the probe ends, not the tool in its child
    )
    (none, (hung,)), (_, (driver,)) = results
    assert none == []
    assert (hung.subject, hung.level) == ("neuron", "error")
    assert driver.message == "1 AMD cards on the PCI bus, but no amdgpu compute driver"


def test_amd_smi_adds_to_whole_cards_and_tells_faults_of_ours_only(said):
    common = {"backend": "amd", "kind": "amd:MI300X", "name": "AMD gfx942"}
    devices = [Device(index=i, pci_address=a, **common) for i, a in enumerate(["0000:05:00.0", "0000:26:00.0"])]
    told, findings = amd_smi.add_details(devices, said("amd-smi"))
    assert [(d.name, d.driver_version) for d in told] == [("AMD Instinct MI300X", "6.12.12")] * 2
    assert [(f.level, f.message) for f in findings] == [
        ("error", "the card at 0000:26:00.0 has had 3 memory errors that ECC could not correct"),
        (
            "warning",
            "the card at 0000:26:00.0 runs below its clock because of heat of its socket and heat of its memory",
        ),
    ]


def test_partitions_of_one_card_keep_what_the_kernel_told(said):
    parts = [Device("amd", "amd:MI300X", i, "AMD gfx942", pci_address="0000:05:00.0") for i in range(2)]
    assert amd_smi.add_details(parts, said("amd-smi"))[0] == parts


def test_an_amd_smi_that_fails_leaves_what_sysfs_told():
    device = Device("amd", "amd:MI300X", 0, "AMD gfx942")
    devices, (finding,) = amd_smi.add_details([device], {"error": "AMDSMI_STATUS_DRIVER_NOT_LOADED"})
    assert devices == [device]
    assert finding.message == "details of cards come from sysfs only: AMD SMI failed: AMDSMI_STATUS_DRIVER_NOT_LOADED"


def test_an_amd_card_above_its_critical_temperature_is_told(machine):
    (device,), (finding,) = amd.find(machine("amd-hot"))
    assert finding.message == "the card at 0000:05:00.0 is too hot: junction is at 101 °C, its limit is 100 °C"
    on_chip = {name: value >> 10 for name, value in device.properties.items() if name.endswith("_bytes")}
    assert on_chip == {"shared_memory_per_block_bytes": 64, "l2_bytes": 4096, "l3_bytes": 262144}


@pytest.mark.parametrize(
    ("backend", "kind", "architecture", "dtypes", "expected"),
    [
        ("nvidia", "nvidia:H100-80GB", "sm_90", ["float8_e4m3fn"], (True, True, 227 << 10)),
        ("nvidia", "nvidia:P100-16GB", "sm_60", ["float16"], (False, False, 48 << 10)),
        ("amd", "amd:MI300X", "gfx942", ["float8_e4m3fnuz"], (True, True, 64 << 10)),
        ("amd", "amd:gfx1030", "gfx1030", ["float16"], (False, False, 64 << 10)),
        ("tpu", "tpu:v5e", "v5e", ["bfloat16"], (False, True, None)),
        ("apple", "apple:M4", "arm64", ["bfloat16"], (False, None, None)),
        ("nvidia", "nvidia:Unheard", "", [], (None, None, None)),
    ],
)
def test_traits_are_those_of_the_architecture(backend, kind, architecture, dtypes, expected):
    told = traits(Device(backend, kind, 0, kind, architecture=architecture), dtypes)
    assert tuple(map(told.get, ("fp8_supported", "matrix_cores", "shared_memory_per_block_bytes"))) == expected


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("3b:00.0", "0000:3b:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("", ""),
        ("none", ""),
    ],
)
def test_addresses_of_all_tools_read_as_the_kernels(text, address):
    assert sysfs_address(text) == address


def test_device_infos_carry_traits_beside_what_was_found(machine):
    (device, _) = HardwareDetector(machine("amd-hot")).detect().devices
    assert device.properties["fp8_supported"]
    assert device.properties["l2_bytes"] == 4 << 20


def test_libraries_that_do_not_load_are_told_with_their_message(tmp_path, monkeypatch):
    (tmp_path / "for_another_torch.py").write_text("raise ImportError('undefined symbol: deleteNode')\n")
    (tmp_path / "crashing.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong, crashed = import_failures(("for_another_torch", "crashing", "json", "not_installed"))
    assert "undefined symbol: deleteNode" in wrong.message
    assert crashed.subject == "crashing"
    assert wrong.remedy
    assert wrong.level == crashed.level == "error"


def test_every_finding_of_every_recorded_machine_says_what_to_do(machine):
    trees = sorted(path.stem for path in (Path(__file__).parents[3] / "data" / "discovery").glob("*.yaml"))
    for name in trees:
        _, findings = discover(machine=machine(name, GCE_METADATA_HOST="127.0.0.1:9"))
        assert all(f.remedy and f.message and f.level in ("info", "warning", "error") for f in findings), name
