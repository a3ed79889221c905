"""Google TPUs from their device files, PCI ids and their VM's metadata, and XLA on the CPU where the environment asks
for it.

A TPU belongs to the first process that opens it: nothing here does. PCI ids as in JAX's hardware_utils and torch_xla.
"""

import re
from importlib.util import find_spec

from cluster.accelerators import EMULATED
from cluster.vocabulary import Device, Finding, Scalar
from workers.discovery import cpu, tpu_vm
from workers.discovery.machine import Machine, PciDevice

VENDOR = 0x1AE0
GENERATIONS = {0x0027: "v3", 0x005E: "v4", 0x0062: "v5p", 0x0063: "v5e", 0x006F: "v6e", 0x0076: "v7x"}
V2_SUBSYSTEM = 0x004E
# TensorCores per chip, and how many devices torch sees of one. Source: Google's pages of each generation.
CORES = {"v2": 2, "v3": 2, "v4": 2, "v5e": 1, "v5p": 2, "v6e": 1, "v7x": 2}
TORCH_DEVICES = {"v2": 2, "v3": 2, "v7x": 2}
MEMORY_GIB = {"v2": 16, "v3": 32, "v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "v7x": 192}


def present(machine: Machine) -> bool:
    asked = machine.environ.get("PJRT_DEVICE", "").upper() == "CPU"
    return asked or any(chip.device in GENERATIONS for chip in machine.pci(VENDOR))


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    if machine.environ.get("PJRT_DEVICE", "").upper() == "CPU":
        return _emulated(machine), []
    chips = [chip for chip in machine.pci(VENDOR) if chip.device in GENERATIONS]
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
    return [_device(chips[i], files[i], i, vm) for i in shown], _findings(machine, files[:count])


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
    here = find_spec("torch_xla") is not None
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


def _device(chip: PciDevice, file: str, index: int, vm: dict[str, Scalar]) -> Device:
    generation = "v2" if (chip.device, chip.subsystem) == (0x0027, V2_SUBSYSTEM) else GENERATIONS[chip.device]
    return Device(
        backend="tpu",
        kind=f"tpu:{generation}",
        index=index,
        name=f"Google TPU {generation}",
        uuid=chip.address,
        total_memory_bytes=MEMORY_GIB[generation] << 30,
        architecture=generation,
        pci_address=chip.address,
        numa_node=chip.numa_node,
        properties={
            "device_file": f"/{file}",
            "tensor_cores": CORES[generation],
            "torch_devices": TORCH_DEVICES.get(generation, 1),
            **vm,
        },
    )
