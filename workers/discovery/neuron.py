"""AWS Trainium and Inferentia through `neuron-ls`, else their device files. A NeuronCore is a device: what
NEURON_RT_VISIBLE_CORES counts.
"""

import json
import shutil
from typing import Any

from cluster import catalogue
from cluster.catalogue import Model
from cluster.vocabulary import Device, Finding
from workers.discovery.machine import Machine, PciDevice, sysfs_address, tool_output

VENDOR = 0x1D0F
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
    said, problem = tool_output([tool, "--json-output"], machine.environ)
    if problem:
        findings.append(Finding("info", "neuron", f"told by PCI ids only: {problem}", "install aws-neuronx-tools"))
    chips_told = [_by_id(chip, model) for chip, model in chips] if problem else json.loads(said)
    cores = devices(chips_told, chips[0][1].model if chips else "core", machine)
    visible = machine.visible("NEURON_RT_VISIBLE_CORES")
    return [d for d in cores if visible is None or d.index in _numbers(visible)], findings


def _chips(machine: Machine) -> list[tuple[PciDevice, Model]]:
    found = ((chip, catalogue.found("neuron", pci_id=f"{chip.device:04x}")) for chip in machine.pci(VENDOR))
    return [(chip, model) for chip, model in found if model is not None]


def _by_id(chip: PciDevice, model: Model) -> dict[str, Any]:
    memory_bytes = int((model.memory_gib or 0) * 2**30)
    return {"nc_count": model.cores_per_card or 1, "memory_size": memory_bytes, "bdf": chip.address}


def devices(told: list[dict[str, Any]], generation: str, machine: Machine) -> list[Device]:
    """`told` is what neuron-ls prints: a chip with its cores and memory in bytes each; a core has an equal share."""
    found: list[Device] = []
    known = catalogue.model(f"neuron:{generation}")
    for chip in told:
        cores, address = int(chip["nc_count"]), sysfs_address(str(chip.get("bdf", "")))
        for _ in range(cores):
            found.append(
                Device(
                    backend="neuron",
                    kind=f"neuron:{generation}",
                    index=len(found),
                    name=f"AWS Neuron core of {generation}",
                    uuid=f"{address}.{len(found)}",
                    total_memory_bytes=int(chip["memory_size"]) // cores,
                    driver_version=machine.text("sys/module/neuron/version"),
                    architecture=known.architecture if known else generation,
                    pci_address=address,
                    numa_node=machine.numa_node(address) if address else None,
                    properties={"cores_per_chip": cores},
                )
            )
    return found


def _numbers(visible: list[str]) -> set[int]:
    """`0-3` and `5` as AWS's runtime reads them."""
    found: set[int] = set()
    for part in visible:
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _no_access() -> Finding:
    return Finding("error", "neuron", "no access to /dev/neuron*", "add this user to the group neuron")
