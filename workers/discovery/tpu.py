"""Google TPUs from their device files, PCI ids and their VM's metadata, and XLA on the CPU where the environment asks
for it.

A TPU belongs to the first process that opens it: nothing here does. PCI ids as in JAX's hardware_utils and torch_xla.
"""

import re

from cluster import catalogue
from cluster.catalogue import EMULATED, Model
from cluster.vocabulary import Device, Finding, Scalar
from workers.discovery import cpu, tpu_vm
from workers.discovery.machine import Machine, PciDevice
from workers.interpreter import has

VENDOR = 0x1AE0


def present(machine: Machine) -> bool:
    asked = machine.environ.get("PJRT_DEVICE", "").upper() == "CPU"
    return asked or bool(_chips(machine))


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    if machine.environ.get("PJRT_DEVICE", "").upper() == "CPU":
        return _emulated(machine), []
    chips = _chips(machine)
    files = _device_files(machine)
    if not chips:
        return [], []
    if not files:
        return [], [Finding("error", "tpu", f"{len(chips)} TPU chips on the PCI bus, but no /dev/accel* or /dev/vfio/*",
                            "give this container access to the TPU's device files")]  # fmt: skip
    vm = tpu_vm.facts(machine.environ)
    count = min(len(files), len(chips))
    visible = machine.visible("TPU_VISIBLE_CHIPS")
    shown = [i for i in range(count) if visible is None or str(i) in visible]
    return [_device(*chips[i], files[i], i, vm) for i in shown], _findings(machine, files[:count])


def _chips(machine: Machine) -> list[tuple[PciDevice, Model]]:
    """A v2 has the id of a v3, and a subsystem of its own."""
    found = (
        (chip, catalogue.found("tpu", pci_id=f"{chip.device:04x}:{chip.subsystem:04x}")) for chip in machine.pci(VENDOR)
    )
    return [(chip, model) for chip, model in found if model is not None]


def _findings(machine: Machine, files: list[str]) -> list[Finding]:
    told = []
    if not any(machine.may_use(file) for file in files):
        told.append(
            Finding("error", "tpu", f"no access to /{files[0]}", "run as root, or give this user the device files")
        )
    pages = machine.text("sys/kernel/mm/transparent_hugepage/enabled")
    if pages and "[always]" not in pages:
        message = f"transparent huge pages are {pages}: host to TPU transfers and start-up are slower without"
        remedy = "echo always > /sys/kernel/mm/transparent_hugepage/enabled, as root"
        told.append(Finding("warning", "tpu", message, remedy))
    return told


def _emulated(machine: Machine) -> list[Device]:
    """Never chosen by itself. Where PJRT_DEVICE=CPU is set but no TPU pool asks, it is told only if it would work."""
    here = has("torch_xla")
    if machine.environ.get("POLYFLEET_BACKEND") != "tpu" and not here:
        return []
    reason = "" if here else "PJRT_DEVICE=CPU, but torch-xla is not in this environment"
    title = f"XLA on {cpu.name(machine)}"
    return cpu.split("tpu", f"tpu:{EMULATED}", title, machine, emulated=True, unavailable_reason=reason)


def _device_files(machine: Machine) -> list[str]:
    """/dev/accel0 … on older images; on newer ones /dev/vfio/GROUP of groups that hold a Google device."""
    accel = [f for f in machine.glob("dev/accel*") if re.fullmatch(r"dev/accel\d+", f)]
    return accel or [f for f in machine.glob("dev/vfio/*") if f.rpartition("/")[2].isdigit() and _is_google(machine, f)]


def _is_google(machine: Machine, file: str) -> bool:
    group = file.rpartition("/")[2]
    vendors = machine.glob(f"sys/kernel/iommu_groups/{group}/devices/*/vendor")
    return any(machine.number(vendor) == VENDOR for vendor in vendors)


def _device(chip: PciDevice, model: Model, file: str, index: int, vm: dict[str, Scalar]) -> Device:
    return Device(
        backend="tpu",
        kind=model.kind,
        index=index,
        name=f"Google TPU {model.model}",
        uuid=chip.address,
        total_memory_bytes=int(model.memory_gib * 2**30) if model.memory_gib else None,
        architecture=model.architecture,
        pci_address=chip.address,
        numa_node=chip.numa_node,
        properties={
            "device_file": f"/{file}",
            "tensor_cores": model.cores_per_card,
            "torch_devices": model.devices_per_card,
            **vm,
        },
    )
