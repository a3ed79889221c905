"""AWS Trainium and Inferentia through `neuron-ls`, else their device files. A NeuronCore is a device: what
NEURON_RT_VISIBLE_CORES counts.
"""

import json
import shutil
from typing import Any

from cluster.vocabulary import Device, Finding
from workers.discovery.machine import Machine, PciDevice, sysfs_address, tool_output

VENDOR = 0x1D0F
# PCI ids of the neuron driver (aws-neuron-driver, neuron_dhal): chip, cores per chip, memory per chip in GiB.
# Core counts and memory: AWS's architecture pages of each chip.
CHIPS = {0x7064: ("inf1", 4, 8), 0x7164: ("trn1", 2, 32), 0x7264: ("inf2", 2, 32), 0x7364: ("trn2", 8, 96)}
TOOL = "/opt/aws/neuron/bin/neuron-ls"


def present(machine: Machine) -> bool:
    return bool(machine.glob("dev/neuron[0-9]*")) or any(d.device in CHIPS for d in machine.pci(VENDOR))


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    chips = [d for d in machine.pci(VENDOR) if d.device in CHIPS]
    files = machine.glob("dev/neuron[0-9]*")
    if not files:
        told = f"{len(chips)} Neuron chips on the PCI bus, but no /dev/neuron*"
        return [], [Finding("warning", "neuron", told, "install aws-neuronx-dkms, or give the container its devices")]
    findings = [] if any(machine.may_use(f) for f in files) else [_no_access()]
    tool = shutil.which("neuron-ls", path=machine.environ.get("PATH")) or str(machine.path(TOOL.lstrip("/")))
    said, problem = tool_output([tool, "--json-output"], machine.environ)
    if problem:
        findings.append(Finding("info", "neuron", f"told by PCI ids only: {problem}", "install aws-neuronx-tools"))
    chips_told = [_by_id(chip) for chip in chips] if problem else json.loads(said)
    generation = CHIPS[chips[0].device][0] if chips else "core"
    cores = devices(chips_told, generation, machine)
    visible = machine.visible("NEURON_RT_VISIBLE_CORES")
    return [d for d in cores if visible is None or d.index in _numbers(visible)], findings


def _by_id(chip: PciDevice) -> dict[str, Any]:
    _, cores, gib = CHIPS[chip.device]
    return {"nc_count": cores, "memory_size": gib << 30, "bdf": chip.address}


def devices(told: list[dict[str, Any]], generation: str, machine: Machine) -> list[Device]:
    """`told` is what neuron-ls prints: a chip with its cores and memory in bytes each; a core has an equal share."""
    found: list[Device] = []
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
                    architecture=generation,
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
