"""Intel GPUs, from DRM's sysfs (drivers xe and i915) and from xpu-smi if installed.

Each tile is a device, as in Level Zero's FLAT mode. Devices are in PCI order.
"""

from cluster import catalogue
from cluster.catalogue import DeviceModel
from cluster.types import Device, Finding
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.memory import host_memory
from workers.devices.discovery.vendors import intel_gaudi as gaudi
from workers.devices.discovery.vendors import intel_smi
from workers.devices.discovery.vendors.intel_gaudi import HABANA

VENDOR = 0x8086
# PCI address that firmware always assigns to the graphics inside a CPU.
INTEGRATED_ADDRESS = "0000:00:02.0"


def present(machine: Machine) -> bool:
    return bool(_cards(machine)) or any(d.is_display or d.vendor == HABANA for d in machine.pci(VENDOR, HABANA))


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    devices: list[Device] = []
    for card in sorted(_cards(machine), key=lambda card: _address(machine, card)):
        devices += _of_card(machine, card, len(devices))
    visible = machine.visible("ZE_AFFINITY_MASK")
    visible_devices = [d for d in devices if visible is None or str(d.index) in visible]
    findings = _findings(machine, devices)
    if any(not d.integrated for d in visible_devices):
        visible_devices, more_findings = intel_smi.add_details(visible_devices, machine)
        findings += more_findings
    gaudis, more_findings = gaudi.find(machine, len(devices))
    return visible_devices + gaudis, findings + more_findings


def _cards(machine: Machine) -> list[str]:
    """Folders card0 … of Intel cards, without connectors such as card0-DP-1."""
    names = [c for c in machine.glob("sys/class/drm/card[0-9]*") if "-" not in c.rpartition("/")[2]]
    return [c for c in names if machine.number(f"{c}/device/vendor") == VENDOR]


def _model(pci_id: int) -> DeviceModel | None:
    return catalogue.match_device("intel", pci_id=f"{pci_id:04x}")


def _address(machine: Machine, card: str) -> str:
    return machine.path(f"{card}/device").resolve().name


def _findings(machine: Machine, devices: list[Device]) -> list[Finding]:
    cards = [d for d in machine.pci(VENDOR) if d.is_display and _model(d.device)]
    if cards and not devices:
        return [
            Finding(
                "warning",
                "intel",
                f"{len(cards)} Intel GPUs on the PCI bus, but no driver",
                "load the xe or i915 driver",
            )
        ]
    if any(d.unavailable_reason.startswith("no access") for d in devices):
        return [Finding("error", "intel", "no access to /dev/dri/renderD*", "add this user to the group render")]
    return []


def _of_card(machine: Machine, card: str, first: int) -> list[Device]:
    address = _address(machine, card)
    pci_id = machine.number(f"{card}/device/device") or 0
    driver = machine.path(f"{card}/device/driver").resolve().name
    tiles = _tiles(machine, card, pci_id)
    vram_bytes, integrated = _memory_bytes(machine, card), address == INTEGRATED_ADDRESS
    card_model = _model(pci_id)
    title = card_model.kind.partition(":")[2] if card_model else f"{pci_id:#06x}"
    shared = host_memory(machine) if integrated else None
    return [
        Device(
            backend="intel",
            kind=f"intel:{title}",
            index=first + tile,
            name=f"Intel {title.replace('-', ' ')}",
            uuid=address if tiles == 1 else f"{address}.{tile}",
            total_memory_bytes=shared.total_bytes if shared else vram_bytes and vram_bytes // tiles,
            free_memory_bytes=shared.free_bytes if shared else None,
            driver_version=machine.text(f"sys/module/{driver}/version"),
            architecture=card_model.architecture if card_model else f"{pci_id:#06x}",
            unavailable_reason=_reason(machine, card, address),
            integrated=integrated,
            unified_memory=integrated,
            pci_address=address,
            numa_node=machine.numa_node(address),
            properties={"driver": driver, "tiles": tiles},
        )
        for tile in range(tiles)
    ]


def _tiles(machine: Machine, card: str, pci_id: int) -> int:
    """Number of tiles. The xe driver has a folder per tile; i915 has one per GT, a tile only on the Max series."""
    xe = len(machine.glob(f"{card}/device/tile[0-9]*"))
    if xe or (model := _model(pci_id)) is None or model.devices_per_card == 1:
        return xe or 1
    return max(1, len(machine.glob(f"{card}/gt/gt[0-9]*")))


def _memory_bytes(machine: Machine, card: str) -> int | None:
    """Memory of all tiles. The kernel's i915 driver does not report it (None); xe and Intel's own i915 do."""
    tiles = [machine.number(t) for t in machine.glob(f"{card}/device/tile[0-9]*/physical_vram_size_bytes")]
    return sum(t for t in tiles if t) or machine.number(f"{card}/lmem_total_bytes")


def _reason(machine: Machine, card: str, address: str) -> str:
    if address == INTEGRATED_ADDRESS:
        return "integrated graphics: not offered to jobs"
    nodes = [n.rpartition("/")[2] for n in machine.glob(f"{card}/device/drm/renderD*")]
    if any(machine.may_use(f"dev/dri/{n}") for n in nodes):
        return ""
    return "no access to /dev/dri/renderD*: add this user to the group render"
