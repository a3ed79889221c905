"""MIG slices, Neuron cores, Gaudi, the slice of a TPU VM, and what a CPU is made of. The data are reconstructions."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from workers.devices.capability.hardware import HardwareDetector
from workers.devices.discovery import discover
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.machine_findings import health, old_drivers
from workers.devices.discovery.vendors import amd, cpu, intel_gaudi, neuron, nvidia, tpu_vm
from workers.devices.discovery.versions import TorchBuild

GiB = 1 << 30
DATA = Path(__file__).parents[3] / "data" / "discovery"


def test_a_mig_slice_is_a_device_with_its_own_memory_shown_by_its_uuid(said):
    devices, _ = nvidia.devices(said("nvidia-mig-and-ill"), None)
    small, large, whole, empty = devices
    assert (small.kind, small.index) == ("nvidia:A100-80GB-MIG-1g.10gb", 100)
    assert (large.kind, large.index) == ("nvidia:A100-80GB-MIG-3g.40gb", 101)
    assert small.total_memory_bytes == 10200547328
    assert small.properties["visible_as"] == small.uuid == "MIG-aaaa"
    assert (whole.kind, whole.index) == ("nvidia:A100-80GB", 1)
    assert "it has no slices" in empty.unavailable_reason


def test_a_node_left_one_slice_reports_that_one(said):
    assert [d.uuid for d in nvidia.devices(said("nvidia-mig-and-ill"), ["MIG-bbbb"])[0]] == ["MIG-bbbb"]


def test_a_gpu_with_memory_errors_without_spare_rows_or_too_hot_is_told_with_a_remedy(said):
    findings = nvidia.devices(said("nvidia-mig-and-ill"), None)[1]
    assert [(f.level, f.message.partition(" (")[0]) for f in findings] == [
        ("error", "GPU 1"),
        ("error", "GPU 1"),
        ("warning", "GPU 1"),
    ]
    assert "3 memory errors since boot that ECC could not correct" in findings[0].message
    assert "no spare memory rows" in findings[1].message
    assert "below its clock because of heat (hardware)" in findings[2].message
    assert all(f.remedy for f in findings)


def test_neuron_cores_are_counted_from_the_tool(said, machine):
    cores = neuron.devices(said("neuron-ls"), "trn1", machine("neuron-trn1"))
    assert [(d.kind, d.index, d.total_memory_bytes) for d in cores] == [
        ("neuron:trn1", 0, 16 * GiB),
        ("neuron:trn1", 1, 16 * GiB),
    ]
    assert cores[0].driver_version == "2.19.64.0"


def test_without_its_tool_a_neuron_chip_is_told_by_its_pci_id(machine):
    devices, findings = discover("neuron", machine("neuron-trn1", PATH="/nowhere", NEURON_RT_VISIBLE_CORES="1"))
    assert [(d.kind, d.index, d.numa_node) for d in devices] == [("neuron:trn1", 1, 0)]
    assert ("info", "details of chips come from their PCI ids only") in [
        (f.level, f.message.partition(":")[0]) for f in findings
    ]


def test_a_neuron_chip_without_its_driver_is_a_finding(machine):
    here = machine("neuron-trn1")
    here.path("dev/neuron0").unlink()
    assert neuron.find(here)[1][0].message == "1 Neuron chips on the PCI bus, but no /dev/neuron*"


def test_gaudi_cards_are_told_but_not_offered():
    cards = intel_gaudi.devices(intel_gaudi.parse_replies((DATA / "gaudi-hl-smi.csv").read_text()), 2)
    assert [(d.kind, d.index, d.total_memory_bytes) for d in cards] == [
        ("intel:Gaudi2", 2, 96 * GiB),
        ("intel:Gaudi2", 3, 96 * GiB),
    ]
    assert "no back end for Gaudi" in cards[0].unavailable_reason


class Metadata(BaseHTTPRequestHandler):
    def do_GET(self):
        attributes = {
            "tpu-env": b"ACCELERATOR_TYPE: 'v5litepod-8'\nTOPOLOGY: '2x4'\nWORKER_ID: '1'\nZONE: 'us-west4-a'\n",
            "instance-id": b"my-tpu\n",
        }
        text = attributes.get(self.path.partition("/attributes/")[2], b"")
        right = text and self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200 if right else 404)
        self.end_headers()
        if right:
            self.wfile.write(text)

    def log_message(self, *_):
        pass


def test_a_tpu_vm_tells_its_slice_from_the_metadata_server():
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        told = tpu_vm.facts({"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"})
    finally:
        server.shutdown()
        server.server_close()
    assert told == {"accelerator_type": "v5litepod-8", "topology": "2x4", "worker_id": 1, "slice_name": "my-tpu"}


def test_the_variables_of_gke_need_no_server_and_none_at_all_is_no_error():
    given = {"TPU_ACCELERATOR_TYPE": "v6e-4", "TPU_TOPOLOGY": "2x2", "GCE_METADATA_HOST": "127.0.0.1:9"}
    assert tpu_vm.facts(given) == {"accelerator_type": "v6e-4", "topology": "2x2"}
    assert tpu_vm.facts(given | {"TPU_NAME": "tpu-group-0"})["slice_name"] == "tpu-group-0"
    hosts = {"TPU_WORKER_HOSTNAMES": "tpu-0-0.tpu,tpu-0-1.tpu"}
    assert tpu_vm.facts(given | hosts)["slice_name"] == "tpu-0-0.tpu"
    assert tpu_vm.facts({"GCE_METADATA_HOST": "127.0.0.1:9"}) == {}


@pytest.mark.parametrize(
    ("topology", "chips", "hosts"),
    [("4x4", 4, 4), ("2x2x4", 4, 4), ("2x4", 8, 1), ("", 4, 1), ("4x4", 5, 1), ("odd", 4, 1), ("2x2", 8, 1)],
)
def test_the_hosts_of_a_slice_follow_from_its_topology_and_the_chips_of_one(topology, chips, hosts):
    assert tpu_vm.slice_hosts({"topology": topology} if topology else {}, chips) == hosts


def test_a_cpu_tells_sockets_cores_nodes_caches_and_instruction_sets(machine):
    told = cpu.find(machine("cpu-two-sockets"))[0][0].properties
    assert {k: told[k] for k in ("sockets", "physical_cores", "logical_cpus", "numa_nodes")} == {
        "sockets": 2,
        "physical_cores": 4,
        "logical_cpus": 8,
        "numa_nodes": 2,
    }
    assert (told["l1d_bytes"], told["l2_bytes"], told["l3_bytes"]) == (48 << 10, 2 << 20, 105 << 20)
    assert told["amx_bf16"]
    assert told["avx512_fp16"]
    assert "sve" not in told


def test_errors_of_an_amd_cards_memory_are_told(machine):
    (finding,) = amd.find(machine("amd-ecc"))[1]
    assert finding.message == "the card at 0000:c1:00.0 has had 2 memory errors that ECC could not correct"


def test_fatal_xids_of_the_kernel_log_are_counted_and_an_applications_own_are_not(machine, said):
    devices, _ = nvidia.devices(said("nvidia-mixed"), None)
    found = [f.message for f in health(devices, machine("nvidia-xids")) if "Xid" in f.message]
    assert found == ["the driver reported Xid 79 (GPU has fallen off the bus) 2x for the GPU at 0000:3b:00"]
    assert [f for f in health([], machine("nvidia-xids")) if "Xid" in f.message] == []


def test_a_driver_older_than_torchs_cuda_is_told(said):
    devices, _ = nvidia.devices(said("nvidia-mixed"), None)
    (finding,) = old_drivers(devices, TorchBuild(cuda="13.0"))
    assert finding.message == "torch is built for CUDA 13.0, but the driver supports CUDA up to 12.8"
    assert old_drivers(devices, TorchBuild(cuda="12.9")) == []


def test_limits_below_the_machine_are_told_but_are_no_fault(machine):
    told = [f for f in health([], machine("cgroup-v2")) if f.subject == "limits"]
    assert {f.level for f in told} == {"info"}
    assert any("GiB of memory may be used" in f.message for f in told)


def test_huge_pages_that_are_not_always_on_are_told_for_a_tpu(machine):
    here = machine("tpu-v5e-vfio", GCE_METADATA_HOST="127.0.0.1:9")
    pages = here.path("sys/kernel/mm/transparent_hugepage/enabled")
    pages.parent.mkdir(parents=True)
    pages.write_text("always [madvise] never\n")
    assert [f.message for f in discover("tpu", here)[1] if "huge pages" in f.message]


def test_all_devices_are_listed_and_one_that_is_not_offered_has_no_number_of_torch(machine):
    inside, card, own = HardwareDetector(machine("amd-integrated-and-card")).detect().devices
    assert [d.backend for d in (inside, card, own)] == ["amd", "amd", "cpu"]
    assert (inside.is_available, inside.device_type) == (False, "cuda")
    assert "integrated graphics" in inside.unavailable_reason
    assert inside.to_dict()["total_memory_gb"] == round(inside.total_memory_gb, 2)


def test_torch_numbers_usable_devices_of_a_back_end_from_zero(machine):
    profile = HardwareDetector(machine("tpu-v5e-vfio", GCE_METADATA_HOST="127.0.0.1:9")).detect()
    assert [d.device_type for d in profile.devices] == ["xla:0", "xla:1", "xla:2", "xla:3", "cpu"]
    assert profile.devices[0].supported_dtypes == (
        *("bfloat16", "bool", "float32", "int16", "int32", "int64", "int8", "uint8"),
    )
    assert HardwareDetector(machine("cgroup-unlimited", POLYFLEET_BACKEND="cpu")).get_optimal_backend() == "cpu"


def test_the_detector_tells_what_discovery_knows_fp8_driver_version_and_topology(machine):
    variables = {"TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_TOPOLOGY": "2x4"}
    chip = HardwareDetector(machine("tpu-v5e-vfio", **variables)).detect().devices[0]
    assert (chip.tpu_version, chip.topology, chip.fp8_supported) == ("v5e", "2x4", False)
    card = HardwareDetector(machine("amd-mi300x")).detect().devices[0]
    assert (card.fp8_supported, card.driver_version, card.tpu_version, card.topology) == (True, "6.12.12", "", "")
    assert card.to_dict()["fp8_supported"] is True


def test_an_empty_machine_has_its_cpu(tmp_path):
    profile = HardwareDetector(Machine(tmp_path, {}, "Linux")).detect()
    assert (profile.hardware_type, profile.device_count) == ("cpu", 1)
    assert profile.total_memory_gb > 0
