"""AWS Trainium and Inferentia through `neuron-ls`, else their device files. A NeuronCore is a device: what
NEURON_RT_VISIBLE_CORES counts.
"""

import json
import re
import shutil
from collections.abc import Sequence
from typing import Any

from cluster import catalogue
from cluster.catalogue import DeviceModel
from cluster.types import Device, Finding
from workers.discovery.card_reply import Answer
from workers.discovery.card_reply import findings as unread
from workers.discovery.machine import BRIDGE, DISPLAY, NETWORK, STORAGE, Machine, PciDevice, sysfs_address, tool_output

VENDOR = 0x1D0F
MAX_CORES = 64
"""Of a chip; the largest so far has 8."""
TOOL = "/opt/aws/neuron/bin/neuron-ls"


def present(machine: Machine) -> bool:
    return bool(machine.glob("dev/neuron[0-9]*")) or bool(_chips(machine))


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    chips = _chips(machine)
    files = machine.glob("dev/neuron[0-9]*")
    if not files:
        told = f"{len(chips)} Neuron chips on the PCI bus, but no /dev/neuron*"
        return [], [Finding("warning", "neuron", told, "install aws-neuronx-dkms, or give the container its devices")]
    findings = [] if any(machine.may_use(f) for f in files) else [_no_access()]
    tool = shutil.which("neuron-ls", path=machine.environ.get("PATH")) or str(machine.path(TOOL.lstrip("/")))
    listed, problem = _list(tool, machine)
    if problem:
        findings.append(
            Finding(
                "info",
                "neuron",
                f"details of chips come from their PCI ids only: {problem}",
                "install aws-neuronx-tools",
            )
        )
        listed = [{"bdf": chip.address} for chip, _ in chips]
    answers = [_answer(number, fields) for number, fields in enumerate(listed)]
    cores = devices(answers, _generation(chips), machine)
    visible = machine.visible("NEURON_RT_VISIBLE_CORES")
    remedy = "run neuron-ls by hand; update aws-neuronx-tools, or reboot if a chip does not answer"
    shown = [d for d in cores if visible is None or d.index in _numbers(visible)]
    return shown, findings + unread("neuron", answers, remedy)


def _list(tool: str, machine: Machine) -> tuple[list[Any], str]:
    """(what neuron-ls says of each chip, "") or ([], why there is nothing)."""
    said, problem = tool_output([tool, "--json-output"], machine.environ)
    if problem:
        return [], problem
    try:
        listed = json.loads(said)
    except ValueError:
        return [], f"neuron-ls printed {said.strip()[:40]!r}, which is not JSON"
    return (listed, "") if isinstance(listed, list) else ([], "neuron-ls printed no list of chips")


def _chips(machine: Machine) -> list[tuple[PciDevice, DeviceModel | None]]:
    """None is the model of a chip that nobody lists, of which the driver has files; it is no other kind of device."""
    found = [(chip, catalogue.match_device("neuron", pci_id=f"{chip.device:04x}")) for chip in machine.pci(VENDOR)]
    listed = [(chip, model) for chip, model in found if model is not None]
    if listed or not machine.glob("dev/neuron[0-9]*"):
        return [*listed]
    return [(chip, model) for chip, model in found if chip.pci_class >> 16 not in (STORAGE, NETWORK, DISPLAY, BRIDGE)]


def _generation(chips: list[tuple[PciDevice, DeviceModel | None]]) -> str:
    """The model of a machine's chips, which are alike; else their PCI id."""
    if not chips:
        return "core"
    chip, model = chips[0]
    return model.model if model else f"{chip.device:#06x}"


def _answer(number: int, fields: Any) -> Answer:
    return Answer.of(f"Neuron chip {number}", "neuron-ls", fields)


def devices(told: Sequence[Any], generation: str, machine: Machine) -> list[Device]:
    """`told` is what neuron-ls prints: a chip with its cores and memory in bytes each, of which a core has an equal
    share. What it does not tell of a chip is that of its model.
    """
    model = catalogue.model(f"neuron:{generation}")
    found: list[Device] = []
    for number, fields in enumerate(told):
        found += _cores(_answer(number, fields), generation, model, len(found), machine)
    return found


def _cores(answer: Answer, generation: str, model: DeviceModel | None, first: int, machine: Machine) -> list[Device]:
    address = sysfs_address(answer.text("bdf"))
    told = answer.number("nc_count", at_least=1, at_most=MAX_CORES)
    count = told or (model and model.cores_per_card) or 1
    listed_bytes = int(model.memory_gib * 2**30) if model and model.memory_gib else None
    memory_bytes = answer.number("memory_size", at_least=1) or listed_bytes
    return [
        Device(
            backend="neuron",
            kind=f"neuron:{generation}",
            index=index,
            name=f"AWS Neuron core of {generation}",
            uuid=f"{address}.{index}",
            total_memory_bytes=memory_bytes and memory_bytes // count,
            driver_version=machine.text("sys/module/neuron/version"),
            architecture=model.architecture if model else generation,
            pci_address=address,
            numa_node=machine.numa_node(address) if address else None,
            properties={"cores_per_chip": count},
        )
        for index in range(first, first + count)
    ]


def _numbers(visible: list[str]) -> set[int]:
    """`0-3` and `5` as AWS's runtime reads them; words that are neither show nothing."""
    found: set[int] = set()
    for part in visible:
        if match := re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part):
            found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _no_access() -> Finding:
    return Finding("error", "neuron", "no access to /dev/neuron*", "add this user to the group neuron")
