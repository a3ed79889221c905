"""Google TPUs, from device files, PCI ids and the VM's metadata; and XLA on the CPU if PJRT_DEVICE=CPU.

A TPU belongs to the first process that opens it, so nothing here opens one. PCI ids are those of JAX's hardware_utils
and torch_xla.
"""

import re

from cluster import catalogue
from cluster.catalogue import EMULATED, DeviceModel
from cluster.types import Device, Finding, Scalar
from workers.devices.discovery.machine import NETWORK, STORAGE, Machine, PciDevice
from workers.devices.discovery.vendors import cpu, tpu_vm
from workers.processes.interpreter import has

VENDOR = 0x1AE0


def present(machine: Machine) -> bool:
    is_emulated = machine.environ.get("PJRT_DEVICE", "").upper() == "CPU"
    return is_emulated or bool(_chips(machine))


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    if machine.environ.get("PJRT_DEVICE", "").upper() == "CPU":
        return _emulated(machine), []
    chips, files = _chips(machine), _device_files(machine)
    if not chips:
        return [], []
    if not files:
        return [], [Finding("error", "tpu", f"{len(chips)} TPU chips on the PCI bus, but no /dev/accel* or /dev/vfio/*",
                            "give this container access to the TPU's device files")]  # fmt: skip
    vm = tpu_vm.facts(machine.environ)
    if (hosts := tpu_vm.slice_hosts(vm, len(chips))) > 1:
        vm["slice_hosts"] = hosts
    matched = _match_files(machine, chips, files)
    visible = machine.visible("TPU_VISIBLE_CHIPS")
    devices = [
        _device(chip, model, file, i, vm)
        for i, (chip, model, file) in enumerate(matched)
        if visible is None or str(i) in visible
    ]
    missing = [chip.address for chip, _ in chips if chip.address not in {chip.address for chip, _, _ in matched}]
    return devices, _findings(machine, [file for _, _, file in matched]) + _without_file(missing)


def _chips(machine: Machine) -> list[tuple[PciDevice, DeviceModel | None]]:
    """Return TPU chips with their models, looked up by device and subsystem id, because v2 and v3 share a device id.

    The model is None for a chip that is not in the catalogue; its device file and PCI class distinguish it from
    Google's network and storage devices.
    """
    files = {_address(machine, file) for file in _device_files(machine)}
    candidates = [
        (chip, catalogue.match_device("tpu", pci_id=f"{chip.device:04x}:{chip.subsystem:04x}"))
        for chip in machine.pci(VENDOR)
    ]
    return [
        (chip, model)
        for chip, model in candidates
        if model is not None or (chip.address in files and chip.pci_class >> 16 not in (STORAGE, NETWORK))
    ]


def _match_files(
    machine: Machine, chips: list[tuple[PciDevice, DeviceModel | None]], files: list[str]
) -> list[tuple[PciDevice, DeviceModel | None, str]]:
    """Match chips to device files, in the order of the files; those that the kernel does not match, in sequence."""
    by_address = {chip.address: (chip, model) for chip, model in chips}
    addresses = {file: address for file in files if (address := _address(machine, file)) in by_address}
    unmatched = iter([pair for address, pair in by_address.items() if address not in addresses.values()])
    pairs = ((file, by_address[addresses[file]] if file in addresses else next(unmatched, None)) for file in files)
    return [(*pair, file) for file, pair in pairs if pair is not None]


def _address(machine: Machine, file: str) -> str:
    """PCI address of the Google device behind a device file; "" if the kernel does not report it."""
    name = file.rpartition("/")[2]
    if file.startswith("dev/accel"):
        device = machine.path(f"sys/class/accel/{name}/device")
        return device.resolve().name if device.exists() else ""
    folders = machine.glob(f"sys/kernel/iommu_groups/{name}/devices/*")
    return next((f.rpartition("/")[2] for f in folders if machine.number(f"{f}/vendor") == VENDOR), "")


def _without_file(addresses: list[str]) -> list[Finding]:
    if not addresses:
        return []
    message = f"no device file in /dev for the TPU chips at {', '.join(addresses)}"
    return [Finding("error", "tpu", message, "give this container all of /dev/accel* or /dev/vfio/*, or reboot")]


def _findings(machine: Machine, files: list[str]) -> list[Finding]:
    findings = []
    if files and not any(machine.may_use(file) for file in files):
        findings.append(
            Finding("error", "tpu", f"no access to /{files[0]}", "run as root, or give this user the device files")
        )
    pages = machine.text("sys/kernel/mm/transparent_hugepage/enabled")
    if pages and "[always]" not in pages:
        message = f"transparent huge pages are {pages}, not [always]: copies to the TPU and start-up are slower"
        remedy = "echo always > /sys/kernel/mm/transparent_hugepage/enabled, as root"
        findings.append(Finding("warning", "tpu", message, remedy))
    return findings


def _emulated(machine: Machine) -> list[Device]:
    """Device emulated on the CPU, never chosen automatically. Outside a TPU pool it is listed only if it would work."""
    has_library = has("torch_xla")
    if machine.environ.get("POLYFLEET_BACKEND") != "tpu" and not has_library:
        return []
    reason = "" if has_library else "PJRT_DEVICE=CPU, but torch-xla is not installed in this environment"
    title = f"XLA on {cpu.name(machine)}"
    return cpu.split("tpu", f"tpu:{EMULATED}", title, machine, emulated=True, unavailable_reason=reason)


def _device_files(machine: Machine) -> list[str]:
    """Device files: /dev/accel0 … on older images, /dev/vfio/GROUP of groups with a Google device on newer ones."""
    accel = [f for f in machine.glob("dev/accel*") if re.fullmatch(r"dev/accel\d+", f)]
    return accel or [f for f in machine.glob("dev/vfio/*") if f.rpartition("/")[2].isdigit() and _address(machine, f)]


def _device(chip: PciDevice, model: DeviceModel | None, file: str, index: int, vm: dict[str, Scalar]) -> Device:
    title = model.model if model else f"{chip.device:#06x}"
    return Device(
        backend="tpu",
        kind=f"tpu:{title}",
        index=index,
        name=f"Google TPU {title}",
        uuid=chip.address,
        total_memory_bytes=int(model.memory_gib * 2**30) if model and model.memory_gib else None,
        architecture=model.architecture if model else "",
        pci_address=chip.address,
        numa_node=chip.numa_node,
        properties={
            "device_file": f"/{file}",
            "tensor_cores": model.cores_per_card if model else None,
            "torch_devices": model.devices_per_card if model else None,
            **vm,
        },
    )
