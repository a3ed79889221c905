"""Devices that have no memory but their machine's, and those that look alike and have their own. The trees and answers
are reconstructions; the machine's memory is that of the machine the tests run on.
"""

import psutil
import pytest

from cluster import catalogue
from workers.devices.discovery import resource_limits
from workers.devices.discovery.memory import device_memory
from workers.devices.discovery.vendors import amd, apple, intel, nvidia

GiB = 1 << 30
HOST = psutil.virtual_memory().total


def card(name, capability, total=None, free=None):
    return {"index": 0, "name": name, "uuid": "GPU-1", "total_bytes": total, "free_bytes": free,
            "pci": "0000000F:01:00.0", "capability": capability, "mig": False, "slices": []}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "capability", "kind", "listed"),
    [
        ("NVIDIA GB10", (12, 1), "nvidia:GB10", 128 * 10**9),
        ("NVIDIA GB10", None, "nvidia:GB10", 128 * 10**9),
        ("NVIDIA Thor", (11, 0), "nvidia:Thor", HOST),
        ("Orin (nvgpu)", (8, 7), "nvidia:Orin", HOST),
    ],
)
def test_an_nvidia_gpu_that_shares_the_machines_memory_has_its_total_and_what_is_free_of_it(
    name, capability, kind, listed, machine
):
    said = {"driver": "580.95", "cuda": "13.0", "cards": [card(name, capability)]}
    (device,), findings = nvidia.devices(said, None, machine("cgroup-unlimited"))
    assert (device.kind, device.unified_memory, findings) == (kind, True, [])
    assert device.total_memory_bytes == min(listed, HOST)
    assert 0 < device.free_memory_bytes <= device.total_memory_bytes
    (limited,), _ = nvidia.devices(said, None, machine("cgroup-v2"))
    assert (limited.total_memory_bytes, limited.free_memory_bytes) == (1 * GiB, 524 << 20)  # of its control group


def test_an_nvidia_card_with_memory_of_its_own_does_not_share(machine):
    grace = card("NVIDIA GH200 480GB", (9, 0), 97871 << 20, 97000 << 20)
    (device,), _ = nvidia.devices({"cards": [grace]}, None, machine("cgroup-v2"))
    assert (device.kind, device.unified_memory) == ("nvidia:GH200-96GB", False)
    assert (device.total_memory_bytes, device.free_memory_bytes) == (97871 << 20, 97000 << 20)


def with_memory_of_its_gpu(here, total_gib, free_gib):
    status = here.path("proc/driver/nvidia/gpus/0009:01:00.0/numa_status")
    node = here.path("sys/devices/system/node/node1/meminfo")
    for path in (status, node):
        path.parent.mkdir(parents=True)
    status.write_text("Node:            1\nStatus:          online\n")
    node.write_text(f"Node 1 MemTotal:  {total_gib << 20} kB\nNode 1 MemFree:   {free_gib << 20} kB\n")


def test_the_memory_of_a_grace_machines_gpu_is_not_counted_as_the_cpus_too(machine):
    here = machine("cgroup-unlimited")
    whole, _ = resource_limits.memory(here)
    with_memory_of_its_gpu(here, 2, 1)
    assert resource_limits.memory(here)[0] == whole - 2 * GiB
    here.path("proc/driver/nvidia/gpus/0009:01:00.0/numa_status").write_text("Node:  -1\nStatus:  disabled\n")
    assert resource_limits.memory(here)[0] == whole


MI300A = "sys/class/kfd/kfd/topology/nodes/1"


def test_an_mi300a_shares_and_an_mi300x_of_the_same_architecture_does_not(machine):
    here = machine("amd-mi300x")
    assert [d.unified_memory for d in amd.find(here)[0]] == [False, False]
    told = here.path(f"{MI300A}/properties")
    told.write_text(told.read_text().replace("device_id 29857", "device_id 29856"))  # 0x74a0
    here.path("sys/class/drm/renderD128/device/product_name").write_text("AMD Instinct MI300A")
    apu, card = amd.find(here)[0]
    assert (apu.kind, apu.unified_memory, apu.total_memory_bytes) == ("amd:MI300A", True, 206141652992)
    assert 0 < apu.free_memory_bytes <= HOST
    assert (card.kind, card.unified_memory) == ("amd:MI300X", False)
    here.path(f"{MI300A}/mem_banks/0/properties").unlink()
    here.path("sys/class/drm/renderD128/device/mem_info_vram_total").write_text("0")
    assert amd.find(here)[0][0].total_memory_bytes == min(128 * 10**9, HOST)


def test_amd_graphics_that_compute_have_what_the_driver_lets_them_map(machine):
    here = machine("amd-integrated-and-card")
    told = here.path(f"{MI300A}/properties")
    told.write_text(told.read_text().replace("100306", "110501"))
    small = here.path("sys/class/drm/renderD128/device")
    small.mkdir(parents=True, exist_ok=True)
    (small / "mem_info_vram_total").write_text(str(512 << 20))
    (small / "mem_info_gtt_total").write_text(str(60 * GiB))
    strix, discrete = amd.find(here)[0]
    assert (strix.kind, strix.unified_memory, strix.total_memory_bytes) == ("amd:gfx1151", True, 60 * GiB)
    assert (discrete.unified_memory, discrete.total_memory_bytes) == (False, 25753026560)


def test_graphics_inside_an_intel_cpu_and_apples_gpu_have_the_machines_memory(machine, said):
    here = machine("intel-arc-and-integrated")
    inside, discrete = intel.find(here)[0]
    assert (inside.total_memory_bytes, inside.unified_memory) == (HOST, True)
    assert (discrete.total_memory_bytes, discrete.unified_memory) == (17079205888, False)
    (gpu,) = apple.devices(said("apple-m4-pro"), here)
    assert (gpu.total_memory_bytes, gpu.unified_memory) == (48 * GiB, True)
    assert 0 < gpu.free_memory_bytes <= HOST


@pytest.mark.parametrize("kind", [row.kind for row in catalogue.models().values()])
def test_every_listed_device_that_shares_has_a_total_without_its_driver(kind):
    row = catalogue.model(kind)
    memory = device_memory(kind, row.architecture, None, None)
    assert memory.total_bytes == row.memory_per_device_bytes
    assert memory.unified == (kind.startswith("apple:") or kind in ("nvidia:GB10", "amd:MI300A"))
