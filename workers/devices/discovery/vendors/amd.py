"""AMD GPUs, from the amdgpu driver's KFD topology and DRM files in sysfs, and from AMD SMI if installed.

HIP numbers devices in the order of KFD's GPU nodes, and does not count nodes that the process may not read.
"""

import re
from pathlib import Path

from cluster import catalogue
from cluster.types import Device, Finding, Scalar
from workers.devices.discovery.card_reply import CardReply
from workers.devices.discovery.card_reply import findings as unread
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.memory import device_memory
from workers.devices.discovery.vendors import amd_smi

VENDOR = 0x1002
NODES = "sys/class/kfd/kfd/topology/nodes"
SYSTEM_HEAP = 0


def present(machine: Machine) -> bool:
    return machine.path(NODES).exists() or any(d.is_display for d in machine.pci(VENDOR))


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    gpus = [
        node for node in machine.glob(f"{NODES}/*") if machine.number(f"{node}/gpu_id") and _properties(machine, node)
    ]
    replies = [CardReply(f"GPU {index}", "KFD", _properties(machine, node)) for index, node in enumerate(gpus)]
    devices = [_device(machine, node, index, replies[index]) for index, node in enumerate(gpus)]
    visible = machine.visible("HIP_VISIBLE_DEVICES")
    if visible is not None:
        devices = [d for d in devices if str(d.index) in visible or d.uuid in visible]
    findings = _findings(machine, devices) + unread("amd", replies, "read dmesg; update the amdgpu driver")
    if devices and machine.root == Path("/") and amd_smi.installed():
        devices, smi_findings = amd_smi.add_details(devices, amd_smi.query())
        findings += [f for f in smi_findings if f not in findings]
    return devices, findings


def _findings(machine: Machine, devices: list[Device]) -> list[Finding]:
    cards = [d for d in machine.pci(VENDOR) if d.is_display]
    if cards and not machine.path(NODES).exists():
        return [
            Finding(
                "warning",
                "amd",
                f"{len(cards)} AMD cards on the PCI bus, but no amdgpu compute driver",
                "install ROCm's driver",
            )
        ]
    if devices and not machine.may_use("dev/kfd"):
        return [Finding("error", "amd", "no access to /dev/kfd", "add this user to the groups render and video")]
    addresses = [d.address for d in cards]
    faulty = [amd_smi.memory_errors(a, errors) for a in addresses if (errors := _memory_errors(machine, a))]
    return faulty + [finding for address in addresses for finding in _temperature_findings(machine, address)]


def _memory_errors(machine: Machine, address: str) -> int:
    """Errors since the driver was loaded that ECC could not correct: `ue: N` of the memory controller's RAS file."""
    content = machine.text(f"sys/bus/pci/devices/{address}/ras/umc_err_count")
    match = re.search(r"^ue:\s*(\d+)", content, re.MULTILINE)
    return int(match[1]) if match else 0


def _temperature_findings(machine: Machine, address: str) -> list[Finding]:
    """Report sensors (millidegrees) at or above the driver's critical temperature, at which it lowers the clock."""
    hot = []
    for sensor in machine.glob(f"sys/bus/pci/devices/{address}/hwmon/hwmon*/temp*_input"):
        now, critical = machine.number(sensor), machine.number(sensor.replace("_input", "_crit"))
        if now is not None and critical and now >= critical:
            label = machine.text(sensor.replace("_input", "_label")) or "it"
            degrees = f"{label} is at {now / 1000:.0f} °C, its limit is {critical / 1000:.0f} °C"
            message = f"the card at {address} is too hot: {degrees}"
            hot.append(Finding("warning", "amd", message, "check fans and inlet temperature"))
    return hot


def _device(machine: Machine, node: str, index: int, properties: CardReply) -> Device:
    version, pci_id = properties.number("gfx_target_version", needed=True), properties.number("device_id") or 0
    gfx = architecture(version) if version else ""
    minor = properties.number("drm_render_minor")
    drm = f"sys/class/drm/renderD{'' if minor is None else minor}/device"
    total, free = _memory(machine, node, drm)
    unique = properties.number("unique_id")
    product = machine.text(f"{drm}/product_name")
    model = _model(product, pci_id, machine.number(f"{drm}/revision") or 0, total)
    kind = f"amd:{model or gfx or (f'{pci_id:#06x}' if pci_id else 'GPU')}"
    if not model and catalogue.unified_memory(kind, gfx):
        total = max(filter(None, (total, machine.number(f"{drm}/mem_info_gtt_total"))), default=None)
    memory = device_memory(kind, gfx, machine, total, free)
    return Device(
        backend="amd",
        kind=kind,
        index=index,
        name=product or f"AMD {kind.partition(':')[2]}",
        uuid=f"GPU-{unique:016x}" if unique else "",
        total_memory_bytes=memory.total_bytes,
        free_memory_bytes=memory.free_bytes,
        driver_version=machine.text("sys/module/amdgpu/version"),
        architecture=gfx,
        unavailable_reason=_reason(machine, gfx),
        integrated=_integrated(gfx),
        unified_memory=memory.unified,
        pci_address=(address := _pci_address(properties)),
        numa_node=machine.numa_node(address) if address else None,
        properties={
            "pci_device": f"{pci_id:#06x}",
            "compute_units": _compute_units(properties),
            **_on_chip(machine, node, properties),
        },
    )


def _model(product: str, pci_id: int, revision: int, total_bytes: int | None) -> str:
    """Model by product name, else by PCI id, revision and memory, because several cards share a PCI id.

    "" for a card not in the catalogue, which is then named by its architecture or PCI id.
    """
    by_id = f"{pci_id:04x}:{revision:02x}"
    row = catalogue.match_device("amd", name=product) or catalogue.match_device(
        "amd", pci_id=by_id, memory_bytes=total_bytes
    )
    return row.kind.partition(":")[2] if row else ""


def _pci_address(properties: CardReply) -> str:
    """PCI address from KFD's location_id (bus, device and function in 16 bits) and domain."""
    location, domain = properties.number("location_id"), properties.number("domain") or 0
    return (
        "" if location is None else f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
    )


def _properties(machine: Machine, node: str) -> dict[str, str]:
    """Read a KFD properties file, lines of `name value`; {} if the device control group hides the node."""
    return dict(line.split(" ", 1) for line in machine.text(f"{node}/properties").splitlines() if " " in line)


def architecture(version: int) -> str:
    """Architecture from KFD's decimal gfx_target_version: 90402 -> gfx942, 90010 -> gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _compute_units(properties: CardReply) -> int:
    return (properties.number("simd_count") or 0) // (properties.number("simd_per_cu") or 1)


def _on_chip(machine: Machine, node: str, properties: CardReply) -> dict[str, Scalar]:
    """LDS per workgroup, largest L2 and L3, in bytes (KFD: KiB); values that KFD lacks are missing."""
    lds = properties.number("lds_size_in_kb")
    sizes_by_name: dict[str, Scalar] = {"shared_memory_per_block_bytes": lds << 10} if lds else {}
    caches = [_properties(machine, cache) for cache in machine.glob(f"{node}/caches/*")]
    for level in ("2", "3"):
        sizes = [int(c["size"]) for c in caches if c.get("level") == level and c.get("size", "").isdigit()]
        if any(sizes):
            sizes_by_name[f"l{level}_bytes"] = max(sizes) << 10
    return sizes_by_name


def _memory(machine: Machine, node: str, drm: str) -> tuple[int | None, int | None]:
    """Return (total, free) bytes. A partition's total comes from KFD; free is None for a partitioned card."""
    banks = [CardReply("", "KFD", _properties(machine, bank)) for bank in machine.glob(f"{node}/mem_banks/*")]
    on_card = [bank for bank in banks if (bank.number("heap_type") or SYSTEM_HEAP) != SYSTEM_HEAP]
    local = sum(bank.number("size_in_bytes") or 0 for bank in on_card)
    card_total, used = machine.number(f"{drm}/mem_info_vram_total"), machine.number(f"{drm}/mem_info_vram_used")
    total = local or card_total
    undivided = total is not None and card_total is not None and total * 2 > card_total
    return total, total - used if total is not None and undivided and used is not None else None


def _integrated(gfx: str) -> bool:
    """Return whether this is graphics inside a CPU, which AMD's torch wheels do not support: not offered to jobs."""
    row = catalogue.architecture("amd", gfx)
    return row is not None and row.integrated


def _reason(machine: Machine, gfx: str) -> str:
    if _integrated(gfx):
        return f"integrated graphics ({gfx}): AMD's torch wheels do not support it"
    return "" if machine.may_use("dev/kfd") else "no access to /dev/kfd: add this user to the groups render and video"
