"""A field that a vendor's driver or tool does not report, or reports as nonsense, costs that field, or that card.

The answers are reconstructions with one thing spoilt; the tools are real child scripts.
"""

import ast
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace as Plain

import psutil
import pytest
from python_scripts import SHEBANG

from workers.devices import discovery
from workers.devices.discovery import discover
from workers.devices.discovery.card_reply import CardReply, findings
from workers.devices.discovery.machine import Machine, sysfs_address
from workers.devices.discovery.vendors import amd, amd_smi, apple, intel, intel_gaudi, intel_smi, neuron, tpu

GiB = 1 << 30
ABSENT = object()
NONSENSE = [None, "N/A", "", "[Not Supported]", "garbage", "-1", -1, [], {}, True, float("nan"), 1 << 80, "1e9", ABSENT]
CHIP = {"neuron_device": 0, "bdf": "00:1e.0", "nc_count": 2, "memory_size": 32 * GiB, "neuron_processes": []}


def spoilt(fields, name, value):
    return {k: v for k, v in fields.items() if k != name} | ({} if value is ABSENT else {name: value})


@pytest.mark.parametrize("value", NONSENSE)
def test_a_number_is_read_or_named_and_one_left_out_is_named_only_where_it_is_needed(value):
    answer = CardReply("card 3", "a tool", spoilt({"size": 5, "count": "7"}, "size", value))
    assert (answer.number("size"), answer.number("count")) == (None, 7)
    wrong = value is not None and value is not ABSENT
    assert answer.problem == (f"a tool reported {value!r} for size, which is not a valid number" if wrong else "")
    assert answer.number("size", needed=True) is None
    assert answer.problem.startswith("a tool reported ") and "size" in answer.problem


def test_a_finding_names_the_card_its_tool_what_this_said_and_what_to_do():
    line = f"{GAUDI.replace('0,', '1,', 1)}".replace("98304", "x").replace("97536", "-2")
    assert "x" in line and "-2" in line
    cards = intel_gaudi.parse_replies("\n".join([GAUDI, line, "card 2 lost"]))
    intel_gaudi.devices(cards, 0)
    rows = [CardReply("GPU 0", "KFD", {}), CardReply("GPU 1", "KFD", None)]
    for row in rows:
        row.number("gfx_target_version", needed=True)
    assert [(f.level, f.subject, f.message, f.remedy) for f in findings("amd", [*cards, *rows], "do this")] == [
        ("warning", "amd", message, "do this")
        for message in (
            "Gaudi card 1: hl-smi reported 'x' for memory.total and '-2' for memory.free, which are not valid numbers",
            "Gaudi card 2: hl-smi reported 'card 2 lost' instead of the data of the card",
            "GPU 0: KFD reported no gfx_target_version",
            "GPU 1: KFD reported nothing instead of the data of the card",
        )
    ]


@pytest.mark.parametrize("file", sorted(Path(discovery.__file__).parent.rglob("*.py")), ids=lambda file: file.stem)
def test_no_sentence_of_discovery_uses_words_that_only_its_authors_know(file):
    """All texts of the program but its docstrings."""
    tree = ast.parse(file.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs]
    private = re.compile(r"\b(tells?|told|no JSON|of ours)\b")
    assert [text for text in texts if isinstance(text, str) and private.search(text)] == []


@pytest.fixture
def with_tool(tmp_path):
    """with_tool(machine, "neuron-ls", code) is that machine with a Python program of this name on its path."""

    def add(machine, name, code):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"{SHEBANG}import sys\n{code}\n")
        tool.chmod(0o755)
        return Machine(machine.root, {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}, "Linux")

    return add


@pytest.mark.parametrize("field", ["bdf", "nc_count", "memory_size", "neuron_device"])
def test_a_line_of_neuron_ls_that_lacks_a_field_costs_no_chip(field, machine):
    others = [{**CHIP, "bdf": f"00:{20 + i}.0"} for i in (1, 2)]
    for value in NONSENSE:
        cores = neuron.devices([others[0], spoilt(CHIP, field, value), others[1]], "trn1", machine("neuron-trn1"))
        assert [(d.index, d.kind, d.total_memory_bytes) for d in cores] == [
            (i, "neuron:trn1", 16 * GiB) for i in range(6)
        ], value
        assert [d.pci_address for d in cores[:2] + cores[4:]] == ["0000:00:21.0"] * 2 + ["0000:00:22.0"] * 2


def test_a_line_of_neuron_ls_that_is_none_keeps_its_chips_place_and_is_named(machine, with_tool):
    lines = [CHIP, "neuron1: no answer", spoilt(CHIP, "nc_count", "N/A"), None]
    here = with_tool(machine("neuron-trn1"), "neuron-ls", f"print({json.dumps(lines)!r})")
    cores, findings = neuron.find(here)
    assert [d.index for d in cores] == list(range(8))
    assert [f.message for f in findings] == [
        "Neuron chip 1: neuron-ls reported 'neuron1: no answer' instead of the data of the card",
        "Neuron chip 2: neuron-ls reported 'N/A' for nc_count, which is not a valid number",
        "Neuron chip 3: neuron-ls reported nothing instead of the data of the card",
    ]
    assert all(f.remedy for f in findings)


def test_words_that_are_no_cores_show_none_and_lose_no_node(machine):
    devices, _ = discover("neuron", machine("neuron-trn1", PATH="/nowhere", NEURON_RT_VISIBLE_CORES="all,1,x-3"))
    assert [d.index for d in devices] == [1]


GAUDI = "0, 01P0-A, 0000:33:00.0, HL-225, 98304, 97536, 1.17.1"


@pytest.mark.parametrize("place", range(7))
def test_a_line_of_hl_smi_that_lacks_a_field_costs_no_card(place):
    for value in ("N/A", "", "garbage", "-1"):
        cells = GAUDI.split(", ")
        cells[place] = value
        told = intel_gaudi.parse_replies("\n".join([GAUDI, ", ".join(cells), GAUDI.replace("0,", "2,", 1)]))
        first, ill, last = intel_gaudi.devices(told, 4)
        assert [(d.kind, d.index, d.total_memory_bytes) for d in (first, last)] == [
            ("intel:Gaudi2", 4, 96 * GiB),
            ("intel:Gaudi2", 6, 96 * GiB),
        ]
        assert ill.index == (5 if place == 0 else 4) and ill.unavailable_reason


def test_a_line_of_hl_smi_that_is_an_error_costs_its_card_and_no_other_intel_gpu(machine, with_tool):
    here = with_tool(machine("intel-max-1550"), "hl-smi", f"print({GAUDI!r}); print('ERROR: card 1 lost')")
    card = here.path("sys/bus/pci/devices/0000:33:00.0")
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x1da3")
    devices, (finding,) = intel.find(here)
    assert [d.kind for d in devices] == ["intel:Max-1550", "intel:Max-1550", "intel:Gaudi2", "intel:Gaudi"]
    assert finding.message == "Gaudi card 1: hl-smi reported 'ERROR: card 1 lost' instead of the data of the card"


XPU = {"device_id": 0, "pci_bdf_address": "0000:03:00.0", "memory_physical_size_byte": "17079205888",
       "memory_free_size_byte": "16000000000", "device_name": "Arc", "driver_version": "I915"}  # fmt: skip


@pytest.mark.parametrize("field", XPU)
def test_what_xpu_smi_does_not_tell_of_a_card_is_that_of_sysfs(field, machine):
    found = intel.find(machine("intel-arc-and-integrated"))[0]
    for value in NONSENSE:
        told, findings = intel_smi.add(found, [spoilt(XPU, field, value)], [])
        assert [(d.kind, d.total_memory_bytes) for d in told] == [(d.kind, d.total_memory_bytes) for d in found]
        named = field.startswith("memory_") and value is not None and value is not ABSENT
        assert len(findings) == named, value
        assert all(
            "the card at 0000:03:00.0: xpu-smi reported " in f.message and f" for {field}, " in f.message
            for f in findings
        )


@pytest.mark.parametrize(
    "code", ["print('{}')", "print('[]')", "print('3')", "print('{\"device_list\": 7}')", "print('null')"]
)
def test_an_xpu_smi_that_lists_no_cards_leaves_what_sysfs_told(code, machine, with_tool):
    devices, (finding,) = intel.find(with_tool(machine("intel-max-1550"), "xpu-smi", code))
    assert len(devices) == 2
    assert finding.message == "details of cards come from sysfs only: xpu-smi printed no list of cards"


def test_one_card_of_which_xpu_smi_tells_no_details_does_not_hide_the_others(machine, with_tool):
    cards = {"device_list": [{"device_id": 7}, {"device_id": 0}]}
    code = f"""
if '-d' not in sys.argv: print({json.dumps(cards)!r})
elif '7' in sys.argv: sys.exit('lost')
else: print({json.dumps(XPU)!r})"""
    devices, (finding,) = intel.find(with_tool(machine("intel-arc-and-integrated"), "xpu-smi", code))
    assert devices[1].free_memory_bytes == 16000000000
    assert finding.message == "details of cards come from sysfs only: card 0: xpu-smi exited with code 1: lost"


class SmiException(Exception):
    pass


READ = {
    "amdsmi_get_gpu_device_bdf": lambda card: f"0000:{card}5:00.0",
    "amdsmi_get_gpu_asic_info": lambda card: {"market_name": "AMD Instinct MI300X"},
    "amdsmi_get_gpu_driver_info": lambda card: {"driver_version": "6.12.12"},
    "amdsmi_get_gpu_total_ecc_count": lambda card: {"uncorrectable_count": 0},
    "amdsmi_get_violation_status": lambda card: {"active_hbm_thrm": 0},
}
"""Answers by hand after AMD's reference of the AMD SMI Python API; no card was asked."""


@pytest.mark.parametrize("call", READ)
@pytest.mark.parametrize("words", ["AMDSMI_STATUS_BUSY", "AMDSMI_STATUS_NOT_SUPPORTED", "N/A", "absent"])
def test_a_call_of_amd_smi_that_fails_costs_what_it_would_have_told(call, words, said):
    def fail(card):
        if card == 1 and words != "N/A":
            raise SmiException(f"Error code:\n\t30 | {words}")
        return "N/A" if card == 1 else READ[call](card)

    smi = Plain(AmdSmiException=SmiException, **{**READ, call: fail})
    if words == "absent":
        delattr(smi, call)
    cards = [amd_smi.query_card(smi, card, card) for card in range(3)]
    devices = [amd.Device("amd", "amd:MI300X", i, "AMD gfx942", pci_address=f"0000:{i}5:00.0") for i in range(3)]
    told, findings = amd_smi.add_details(devices, {"cards": cards})
    assert [d.index for d in told] == [0, 1, 2]
    assert all(d.name and d.driver_version != "N/A" and d.name != "N/A" for d in told)
    if words != "absent":
        assert (told[0].name, told[2].driver_version) == ("AMD Instinct MI300X", "6.12.12")
    if words == "AMDSMI_STATUS_BUSY":
        (finding,) = findings
        assert f"{call} failed: Error code: 30 | AMDSMI_STATUS_BUSY" in finding.message and finding.remedy
        assert "0000:15:00.0" in finding.message or finding.message.startswith("card 1 of AMD SMI")
    else:
        assert findings == []


@pytest.mark.parametrize("line", [
    "simd_count", "simd_per_cu", "gfx_target_version", "device_id", "drm_render_minor", "unique_id", "location_id",
])  # fmt: skip
def test_a_line_of_kfd_that_lacks_a_number_costs_no_card(line, machine):
    for value in ("garbage", "", "-1", None):
        here = machine("amd-mi300x")
        file = here.path("sys/class/kfd/kfd/topology/nodes/1/properties")
        lines = [f"{line} {value}" if x.split()[0] == line else x for x in file.read_text().splitlines()]
        file.write_text("\n".join(x for x in lines if value is not None or x.split()[0] != line))
        devices, findings = amd.find(here)
        assert [(d.index, d.total_memory_bytes) for d in devices] == [(0, 206141652992), (1, 206141652992)]
        assert devices[1].kind == "amd:MI300X" and devices[0].kind.startswith("amd:")
        assert devices[0].kind == "amd:MI300X" or line in ("device_id", "drm_render_minor"), devices[0]
        assert all(f.message.startswith("GPU 0: KFD reported ") and line in f.message and f.remedy for f in findings)
        here.root.joinpath("sys").rename(here.root / f"sys-{value}")


def test_an_amd_card_that_nobody_lists_is_called_by_its_architecture_else_by_its_pci_id(machine):
    here = machine("amd-mi300x")
    file = here.path("sys/class/kfd/kfd/topology/nodes/1/properties")
    here.path("sys/class/drm/renderD128/device/product_name").write_text("")
    told = file.read_text().replace("device_id 29857", "device_id 4660")
    file.write_text(told)
    assert amd.find(here)[0][0].kind == "amd:gfx942"
    file.write_text(told.replace("gfx_target_version 90402", ""))
    device, (finding,) = amd.find(here)[0][0], amd.find(here)[1]
    assert (device.kind, device.architecture) == ("amd:0x1234", "")
    assert finding.message == "GPU 0: KFD reported no gfx_target_version"


def mac(tmp_path, said, status=0, brand="Apple M4 Pro"):
    """A system_profiler that prints this, and sysctl, as real programs below a root."""
    for name, text in (("system_profiler", said), ("sysctl", brand)):
        tool = tmp_path / name
        tool.write_text(f"{SHEBANG}print({text!r})\nraise SystemExit({status if name != 'sysctl' else 0})\n")
        tool.chmod(0o755)


@pytest.mark.parametrize("said", ["not JSON", "null", "[]", '{"SPHardwareDataType": "x"}', "{}"])
def test_a_mac_whose_system_profiler_fails_is_known_by_its_kernel(said, tmp_path, monkeypatch):
    mac(tmp_path, said)
    monkeypatch.setattr(apple, "COMMAND", [str(tmp_path / "system_profiler")])
    monkeypatch.setattr(apple, "BRAND", [str(tmp_path / "sysctl")])
    (device,), findings = apple.find(Machine(tmp_path, dict(os.environ), "Darwin"))
    assert (device.kind, device.unified_memory) == ("apple:M4-Pro", True)
    assert device.total_memory_bytes == min(64 * 10**9, psutil.virtual_memory().total)
    assert device.free_memory_bytes
    assert all(f.remedy for f in findings)


@pytest.mark.parametrize("value", NONSENSE)
def test_what_system_profiler_does_not_tell_costs_that_field(value, said):
    told = said("apple-m4-pro")
    gpu = next(g for g in told["SPDisplaysDataType"] if g.get("sppci_model"))
    gpu["sppci_cores"] = value if value is not ABSENT else "16"
    told["SPHardwareDataType"][0]["physical_memory"] = None
    (device,) = apple.devices(told)
    assert (device.kind, device.total_memory_bytes) == ("apple:M4-Pro", 64 * 10**9)
    assert device.properties["gpu_cores"] == (16 if value is ABSENT else None)


def test_a_tpu_chip_without_its_device_file_is_named_and_the_others_keep_theirs(machine):
    here = machine("tpu-v5e-vfio", GCE_METADATA_HOST="127.0.0.1:9")
    here.path("dev/vfio/1").unlink()
    devices, findings = tpu.find(here)
    assert [(d.pci_address, d.properties["device_file"]) for d in devices] == [
        ("0000:00:04.0", "/dev/vfio/0"),
        ("0000:00:06.0", "/dev/vfio/2"),
        ("0000:00:07.0", "/dev/vfio/3"),
    ]
    assert [f.message for f in findings] == ["no device file in /dev for the TPU chips at 0000:00:05.0"]


def test_a_tpu_that_nobody_lists_is_called_by_its_pci_id(machine):
    here = machine("tpu-v5e-vfio", GCE_METADATA_HOST="127.0.0.1:9")
    here.path("sys/bus/pci/devices/0000:00:05.0/device").write_text("0x0f00")
    devices, _ = tpu.find(here)
    assert [d.kind for d in devices] == ["tpu:v5e", "tpu:0x0f00", "tpu:v5e", "tpu:v5e"]
    assert tpu.present(here)
    here.path("sys/bus/pci/devices/0000:00:05.0/class").write_text("0x020000")  # Google's network device
    assert [d.kind for d in tpu.find(here)[0]] == ["tpu:v5e"] * 3


@pytest.mark.parametrize("text", ["gggg:3b:00.0", "N/A", "::", "a:b:c:d", "0000:3b:00.0; rm", None])
def test_an_address_that_is_none_is_none(text):
    assert sysfs_address(str(text)) == ""


class Faulty(Machine):
    """A machine whose kernel ends the reading of DRM's folder in an error."""

    def glob(self, pattern):
        if pattern.startswith("sys/class/drm"):
            raise OSError(5, "Input/output error")
        return Machine.glob(self, pattern)


def test_a_vendor_that_cannot_be_looked_for_costs_itself_only(machine):
    here = machine("amd-mi300x")
    devices, findings = discover(machine=Faulty(here.root, here.environ, here.system))
    assert [d.kind for d in devices] == ["amd:MI300X", "amd:MI300X", "cpu"]
    assert any(f.subject == "intel" and "Input/output error" in f.message and f.remedy for f in findings)


def test_a_neuron_chip_that_nobody_lists_is_called_by_its_pci_id(machine):
    here = machine("neuron-trn1", PATH="/nowhere")
    here.path("sys/bus/pci/devices/0000:00:1e.0/device").write_text("0x7f64")
    network = here.path("sys/bus/pci/devices/0000:00:05.0")
    network.mkdir()
    for name, text in (("vendor", "0x1d0f"), ("device", "0xec20"), ("class", "0x020000")):
        (network / name).write_text(text)
    devices, findings = neuron.find(here)
    assert [(d.kind, d.pci_address, d.total_memory_bytes) for d in devices] == [("neuron:0x7f64", "0000:00:1e.0", None)]
    assert findings[0].message.startswith("details of chips come from their PCI ids only: ")


def test_gaudi_cards_without_their_tool_are_told_by_their_pci_ids(machine):
    here = machine("intel-max-1550", PATH="/nowhere")
    for address, device in (("0000:33:00.0", "0x1020"), ("0000:34:00.0", "0x10ff")):
        card = here.path(f"sys/bus/pci/devices/{address}")
        card.mkdir(parents=True)
        (card / "vendor").write_text("0x1da3")
        (card / "device").write_text(device)
    devices, (finding,) = intel.find(here)
    assert [(d.kind, d.index, d.pci_address, bool(d.unavailable_reason)) for d in devices[2:]] == [
        ("intel:Gaudi2", 2, "0000:33:00.0", True),
        ("intel:0x10ff", 3, "0000:34:00.0", True),
    ]
    assert finding.message.startswith("2 Gaudi cards on the PCI bus, but hl-smi could not be started")
