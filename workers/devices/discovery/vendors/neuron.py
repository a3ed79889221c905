"""AWS Trainium and Inferentia, from `neuron-ls`, else from device files and PCI ids.

Each NeuronCore is a device, numbered as in NEURON_RT_VISIBLE_CORES.
"""

import json
import re
import shutil
from collections.abc import Sequence
from typing import Any

from cluster import catalogue
from cluster.catalogue import DeviceModel
from cluster.types import Device, Finding
from workers.devices.discovery.card_reply import CardReply
from workers.devices.discovery.card_reply import findings as unread
from workers.devices.discovery.machine import (
    BRIDGE,
    DISPLAY,
    NETWORK,
    STORAGE,
    Machine,
    PciDevice,
    sysfs_address,
    tool_output,
)

VENDOR = 0x1D0F
MAX_CORES = 64
"""Upper limit of cores per chip for plausible data; the largest chip so far has 8."""
TOOL = "/opt/aws/neuron/bin/neuron-ls"


def present(machine: Machine) -> bool:
    return bool(machine.glob("dev/neuron[0-9]*")) or bool(_chips(machine))


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    chips = _chips(machine)
    files = machine.glob("dev/neuron[0-9]*")
    if not files:
        message = f"{len(chips)} Neuron chips on the PCI bus, but no /dev/neuron*"
        return [], [
            Finding("warning", "neuron", message, "install aws-neuronx-dkms, or give the container its devices")
        ]
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
    replies = [_card_reply(number, fields) for number, fields in enumerate(listed)]
    cores = devices(replies, _generation(chips), machine)
    visible = machine.visible("NEURON_RT_VISIBLE_CORES")
    remedy = "run neuron-ls by hand; update aws-neuronx-tools, or reboot if a chip does not respond"
    visible_devices = [d for d in cores if visible is None or d.index in _numbers(visible)]
    return visible_devices, findings + unread("neuron", replies, remedy)


def _list(tool: str, machine: Machine) -> tuple[list[Any], str]:
    """Return (fields of each chip from neuron-ls, "") or ([], reason)."""
    output, problem = tool_output([tool, "--json-output"], machine.environ)
    if problem:
        return [], problem
    try:
        listed = json.loads(output)
    except ValueError:
        return [], f"neuron-ls printed {output.strip()[:40]!r}, which is not JSON"
    return (listed, "") if isinstance(listed, list) else ([], "neuron-ls printed no list of chips")


def _chips(machine: Machine) -> list[tuple[PciDevice, DeviceModel | None]]:
    """Return chips with their models. The model is None for a chip that is not in the catalogue.

    Such a chip counts only if the driver has device files and its PCI class is not that of another kind of device.
    """
    candidates = [(chip, catalogue.match_device("neuron", pci_id=f"{chip.device:04x}")) for chip in machine.pci(VENDOR)]
    listed = [(chip, model) for chip, model in candidates if model is not None]
    if listed or not machine.glob("dev/neuron[0-9]*"):
        return [*listed]
    return [
        (chip, model) for chip, model in candidates if chip.pci_class >> 16 not in (STORAGE, NETWORK, DISPLAY, BRIDGE)
    ]


def _generation(chips: list[tuple[PciDevice, DeviceModel | None]]) -> str:
    """Model of the machine's chips, which are all the same, or their PCI id."""
    if not chips:
        return "core"
    chip, model = chips[0]
    return model.model if model else f"{chip.device:#06x}"


def _card_reply(number: int, fields: Any) -> CardReply:
    return CardReply.of(f"Neuron chip {number}", "neuron-ls", fields)


def devices(rows: Sequence[Any], generation: str, machine: Machine) -> list[Device]:
    """Make devices of neuron-ls's rows, one per chip with its number of cores and memory in bytes.

    Each core gets an equal share of the memory. Values that a row lacks come from the model.
    """
    model = catalogue.model(f"neuron:{generation}")
    cores: list[Device] = []
    for number, fields in enumerate(rows):
        cores += _cores(_card_reply(number, fields), generation, model, len(cores), machine)
    return cores


def _cores(reply: CardReply, generation: str, model: DeviceModel | None, first: int, machine: Machine) -> list[Device]:
    address = sysfs_address(reply.text("bdf"))
    reported_cores = reply.number("nc_count", at_least=1, at_most=MAX_CORES)
    count = reported_cores or (model and model.cores_per_card) or 1
    listed_bytes = int(model.memory_gib * 2**30) if model and model.memory_gib else None
    memory_bytes = reply.number("memory_size", at_least=1) or listed_bytes
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
    """Parse items such as `0-3` and `5`, like AWS's runtime; other items are ignored."""
    numbers: set[int] = set()
    for part in visible:
        if match := re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part):
            numbers |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return numbers


def _no_access() -> Finding:
    return Finding("error", "neuron", "no access to /dev/neuron*", "add this user to the group neuron")
