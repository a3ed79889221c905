import sys

import pytest

from cluster.types import Device
from workers.devices.discovery import NAMES, discover
from workers.devices.discovery.machine import Machine, tool_output
from workers.devices.discovery.vendors import amd, apple, intel, nvidia, tpu

GiB = 1 << 30


def test_mi300x_are_found_in_the_order_hip_counts(machine):
    devices, findings = amd.find(machine("amd-mi300x"))
    assert findings == []
    assert devices[0] == Device(
        backend="amd",
        kind="amd:MI300X",
        index=0,
        name="AMD Instinct MI300X OAM",
        uuid="GPU-0000090000000000",
        total_memory_bytes=206141652992,
        free_memory_bytes=206141652992 - 295698432,
        driver_version="6.12.12",
        architecture="gfx942",
        pci_address=devices[0].pci_address,
        properties={"pci_device": "0x74a1", "compute_units": 304},
    )
    assert [d.index for d in devices] == [0, 1]


def test_graphics_inside_the_cpu_do_not_hide_the_amd_card_beside_them(machine):
    inside, card = amd.find(machine("amd-integrated-and-card"))[0]
    assert "integrated graphics (gfx1036)" in inside.unavailable_reason
    assert (card.kind, card.index, card.unavailable_reason) == ("amd:gfx1100", 1, "")
    assert card.total_memory_bytes == 25753026560


def test_an_amd_node_hidden_by_the_container_is_not_counted(machine):
    assert [d.index for d in amd.find(machine("amd-integrated-and-card"))[0]] == [0, 1]


def test_only_amd_devices_left_to_this_node_are_reported(machine):
    assert [d.index for d in amd.find(machine("amd-mi300x", HIP_VISIBLE_DEVICES="1"))[0]] == [1]
    assert amd.find(machine("amd-mi300x", HIP_VISIBLE_DEVICES=""))[0] == []


def test_an_amd_card_without_its_driver_is_a_finding_not_a_device(machine):
    devices, findings = amd.find(machine("amd-no-driver"))
    assert devices == []
    assert findings[0].message == "1 AMD cards on the PCI bus, but no amdgpu compute driver"


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (110001, "gfx1101"), (90500, "gfx950")]
)
def test_kfd_versions_read_as_architectures(version, name):
    assert amd.architecture(version) == name


def test_tpu_chips_behind_vfio_are_counted_without_other_vendors(machine):
    devices, findings = tpu.find(machine("tpu-v5e-vfio"))
    assert findings == []
    assert [(d.kind, d.index, d.total_memory_bytes) for d in devices] == [("tpu:v5e", i, 16 * GiB) for i in range(4)]
    assert devices[3].pci_address == "0000:00:07.0"
    assert devices[3].properties == {"device_file": "/dev/vfio/3", "tensor_cores": 1, "torch_devices": 1}


def test_a_v2_chip_is_told_from_a_v3_by_its_subsystem(machine):
    (device,) = tpu.find(machine("tpu-v2-accel"))[0]
    assert (device.kind, device.properties["device_file"]) == ("tpu:v2", "/dev/accel0")


def test_a_tpu_without_device_file_is_a_finding(machine):
    devices, findings = tpu.find(machine("tpu-no-files"))
    assert devices == []
    assert "no /dev/accel* or /dev/vfio/*" in findings[0].message


def test_xla_on_the_cpu_is_an_emulated_device_only_in_a_tpu_pool(machine):
    pool = {"PJRT_DEVICE": "CPU", "POLYFLEET_BACKEND": "tpu", "POLYFLEET_DEVICES": "2"}
    devices, _ = tpu.find(machine("tpu-v5e-vfio", **pool))
    assert [(d.kind, d.index, d.emulated) for d in devices] == [("tpu:emulated", 0, True), ("tpu:emulated", 1, True)]
    assert tpu.find(machine("tpu-v2-accel", PJRT_DEVICE="CPU")) == ([], [])


def test_each_tile_of_an_intel_max_is_a_device_with_its_own_memory(machine):
    devices, findings = intel.find(machine("intel-max-1550"))
    assert findings == []
    assert [(d.kind, d.index, d.uuid, d.total_memory_bytes) for d in devices] == [
        ("intel:Max-1550", 0, "0000:3c:00.0.0", 64 * GiB),
        ("intel:Max-1550", 1, "0000:3c:00.0.1", 64 * GiB),
    ]
    assert devices[0].driver_version == "1.1.0"


def test_intel_gpus_count_in_pci_order_and_the_integrated_one_is_not_offered(machine):
    inside, card = intel.find(machine("intel-arc-and-integrated"))[0]
    assert (inside.index, inside.unavailable_reason) == (0, "integrated graphics: not offered to jobs")
    assert (card.index, card.kind, card.total_memory_bytes) == (1, "intel:Arc-A770", 17079205888)
    assert card.unavailable_reason == ""


def test_nvml_answers_become_devices_that_tell_memory_sizes_apart(said):
    devices, findings = nvidia.devices(said("nvidia-mixed"), None)
    assert [(d.kind, d.index, d.architecture) for d in devices] == [
        ("nvidia:A100-40GB", 0, "sm_80"),
        ("nvidia:A100-80GB", 1, "sm_80"),
        ("nvidia:H200", 2, "sm_90"),
    ]
    assert findings == []
    assert [bool(d.unavailable_reason) for d in devices] == [False, True, False]


def test_a_node_limited_to_some_nvidia_gpus_reports_those_by_number_or_uuid(said):
    assert [d.index for d in nvidia.devices(said("nvidia-mixed"), ["2", "GPU-aaaa"])[0]] == [0, 2]
    assert nvidia.devices(said("nvidia-mixed"), [])[0] == []


@pytest.mark.parametrize(
    ("name", "mib", "model"),
    [
        ("Tesla V100-SXM2-16GB", 16160, "V100-16GB"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100-80GB"),
        ("NVIDIA H100 NVL", 95830, "H100-94GB"),
        ("NVIDIA GH200 480GB", 97871, "GH200-96GB"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX6000-Ada"),
        ("NVIDIA L40S", 46068, "L40S"),
        ("Tesla T4", 15360, "T4"),
        ("NVIDIA Unheard 1", 999424, "Unheard-1-976GB"),
    ],
)
def test_nvidia_product_names_become_models(name, mib, model):
    assert nvidia.model(name, mib << 20) == model


def test_an_nvidia_card_without_driver_is_a_finding_and_a_network_card_is_none(machine):
    devices, findings = nvidia.find(machine("nvidia-no-driver"))
    assert devices == []
    assert findings[0].message == "1 NVIDIA cards on the PCI bus, but no driver is loaded"


def test_an_nvml_that_fails_is_a_finding():
    devices, findings = nvidia.devices({"error": "Driver/library version mismatch"}, None)
    assert devices == []
    assert "version mismatch" in findings[0].message


@pytest.mark.gpu
def test_nvml_tells_of_the_gpus_here():
    devices, findings = nvidia.find(Machine())
    if not devices:
        pytest.skip(f"no NVIDIA GPU here: {[f.message for f in findings]}")
    assert all(d.kind.startswith("nvidia:") and d.total_memory_bytes and d.uuid.startswith("GPU-") for d in devices)


def test_an_apple_gpu_has_the_memory_of_its_machine(said):
    (device,) = apple.devices(said("apple-m4-pro"))
    assert (device.kind, device.total_memory_bytes, device.properties["gpu_cores"]) == ("apple:M4-Pro", 48 * GiB, 16)


def test_a_mac_with_an_intel_cpu_has_no_apple_gpu():
    assert (
        apple.devices({"SPHardwareDataType": [{"cpu_type": "6-Core Intel Core i7"}], "SPDisplaysDataType": [{}]}) == []
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_vendor_finds_nothing_on_an_empty_machine(name, tmp_path):
    devices, findings = discover(name, Machine(tmp_path, {}, "Linux"))
    assert [d.kind for d in devices] == (["cpu"] if name == "cpu" else [])
    assert findings == ()


def test_a_tool_that_hangs_is_killed_and_told():
    out, problem = tool_output([sys.executable, "-c", "import time; time.sleep(60)"], {}, timeout_s=0.2)
    assert out == ""
    assert "did not finish within" in problem


def test_a_tool_that_fails_tells_its_last_line():
    _, problem = tool_output([sys.executable, "-c", "raise SystemExit('no card')"], {})
    assert problem.endswith("exited with code 1: no card")
    assert "could not be started" in tool_output(["/does/not/exist"], {})[1]
