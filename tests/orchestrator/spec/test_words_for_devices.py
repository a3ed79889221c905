"""Each word for a model, submitted alone, meets what discovery calls that device: from the answers of its tool, or its
files in sysfs, to the kind. Those answers are put together from the catalogue's rows: names and ids that vendors print.
"""

import re

import pytest

from cluster import catalogue
from orchestrator.spec.resource_syntax import accelerators
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.vendors import amd, apple, intel, intel_gaudi, neuron, nvidia, tpu

GiB = 1 << 30
KEPT = 0.99
"""Of its memory a card tells a little less than it is sold with."""
ROWS = [row for row in catalogue.models().values() if row.tier != "cpu" and (row.tool_names or row.pci_ids)]


def bytes_of(row):
    return int((row.memory_gb or 8) / row.devices_per_card * KEPT * GiB)


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))


def nvidia_kinds(row, root):
    names = row.tool_names or (f"NVIDIA {row.model}",)
    cards = [{"index": 0, "name": name, "uuid": "GPU-1", "total_bytes": bytes_of(row)} for name in names]
    return {d.kind for d in nvidia.devices({"cards": cards}, None)[0]}


def amd_kinds(row, root):
    """By the driver's name of the product, and by PCI id and revision where there is none."""
    gfx = re.fullmatch(r"gfx(\d+)(\w)(\w)", row.architecture)
    version = int(gfx[1]) * 10000 + int(gfx[2], 16) * 100 + int(gfx[3], 16)
    found = set()
    for number, (name, pci_id) in enumerate([(n, "0000") for n in row.tool_names] + [("", i) for i in row.pci_ids]):
        node, drm = f"sys/class/kfd/kfd/topology/nodes/{number + 1}", f"sys/class/drm/renderD{128 + number}/device"
        told = f"gfx_target_version {version}\ndrm_render_minor {128 + number}\ndevice_id {int(pci_id[:4], 16)}\n"
        write(root, {f"{node}/gpu_id": 7, f"{node}/properties": told, "dev/kfd": ""})
        write(root, {f"{drm}/product_name": name, f"{drm}/revision": f"0x{pci_id[5:] or '00'}"})
        write(root, {f"{drm}/mem_info_vram_total": bytes_of(row)})
    for device in amd.find(Machine(root, {}, "Linux"))[0]:
        found.add(device.kind)
    return found


def intel_kinds(row, root):
    if row.unavailable:
        said = [f"0, uuid, 0000:19:00.0, {name}, 98304, 98304, 1.0" for name in row.tool_names]
        return {d.kind for line in said for d in intel_gaudi.devices(intel_gaudi.parse_replies(line), 0)}
    for number, pci_id in enumerate(row.pci_ids):
        device = root / f"sys/devices/0000:3{number}:00.0"
        write(device, {"vendor": "0x8086", "device": f"0x{pci_id}", "drm/renderD128/x": ""})
        card = root / f"sys/class/drm/card{number}"
        card.mkdir(parents=True)
        (card / "device").symlink_to(device)
    return {d.kind for d in intel.find(Machine(root, {}, "Linux"))[0]}


def tpu_kinds(row, root):
    pci_id, _, subsystem = row.pci_ids[0].partition(":")
    chip = "sys/bus/pci/devices/0000:00:04.0"
    write(root, {f"{chip}/vendor": "0x1ae0", f"{chip}/device": f"0x{pci_id}", "dev/accel0": ""})
    write(root, {f"{chip}/subsystem_device": f"0x{subsystem or '0'}"})
    nowhere = {"GCE_METADATA_HOST": "127.0.0.1:9"}
    return {d.kind for d in tpu.find(Machine(root, nowhere, "Linux"))[0]}


def neuron_kinds(row, root):
    found = set()
    for number, pci_id in enumerate(row.pci_ids):
        chip, here = "sys/bus/pci/devices/0000:00:1e.0", root / str(number)
        write(here, {f"{chip}/vendor": "0x1d0f", f"{chip}/device": f"0x{pci_id}", "dev/neuron0": ""})
        found |= {d.kind for d in neuron.find(Machine(here, {"PATH": "/nowhere"}, "Linux"))[0]}
    return found


def apple_kinds(row, root):
    said = [{"SPHardwareDataType": [{"chip_type": name, "physical_memory": "32 GB"}]} for name in row.tool_names]
    return {d.kind for answer in said for d in apple.devices(answer)}


KINDS = {"nvidia": nvidia_kinds, "amd": amd_kinds, "intel": intel_kinds, "tpu": tpu_kinds, "neuron": neuron_kinds,
         "apple": apple_kinds}  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_every_word_for_a_model_meets_what_discovery_calls_it(row, tmp_path):
    kinds = KINDS[row.backend](row, tmp_path)
    assert kinds == {row.kind}
    for word in (row.model, row.kind.partition(":")[2], row.kind, *row.spellings):
        (wanted,) = accelerators(word)
        assert any(catalogue.matches_pattern(pattern, row.kind) for pattern in wanted.kinds), word


ALONE_BEFORE = """
    P100 V100 T4 A10 A10G A16 A30 A40 A100 A6000 L4 L40 L40S RTX3090 RTX4090 RTX5090 H20 H100 H200 GH200 B200 B300 GB200
    GB300 MI100 MI210 MI250 MI250X MI300A MI300X MI325X MI350X MI355X v2 v3 v4 v5e v5p v6e v7x Max1100 Max1550 B580
    Gaudi2 Gaudi3 Trainium1 Trainium2 Trainium3 Inferentia2 M1 M2 M3 M4 M5
"""


@pytest.mark.parametrize("word", re.findall(r"\w+", ALONE_BEFORE))
def test_every_model_that_could_ever_stand_alone_still_means_a_kind_that_discovery_reports(word):
    (wanted,) = accelerators(word)
    assert any(catalogue.matches_pattern(pattern, kind) for pattern in wanted.kinds for kind in catalogue.models())


def test_a_card_that_nobody_lists_may_be_asked_for_as_discovery_calls_it():
    cards = [{"index": 0, "name": "NVIDIA GeForce RTX 9999", "uuid": "GPU-1", "total_bytes": 24 * GiB}]
    (device,) = nvidia.devices({"cards": cards}, None)[0]
    assert device.kind == "nvidia:RTX-9999-24GB"
    for word in (device.kind, "cuda:rtx-9999"):
        (wanted,) = accelerators(word)
        assert catalogue.matches_pattern(wanted.kinds[0], device.kind)
