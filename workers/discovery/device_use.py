"""How busy the accelerators of a node are, as their drivers tell it without anybody opening a device.

NVIDIA cards are asked over NVML, AMD's over the files of amdgpu in sysfs (`gpu_busy_percent`, `mem_info_vram_used`).
Other vendors tell nothing without a tool of theirs, whose start costs more than what it says is worth.
"""

import threading
from collections.abc import Sequence

from cluster.types import Device, DeviceUse
from workers.discovery import nvidia_state
from workers.discovery.machine import Machine

WAIT_S = 0.05
"""A reading takes a millisecond per device; one that takes longer is told with the next facts."""


class LiveUse:
    """The newest reading. A driver that hangs keeps one thread, and no other is started."""

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine or Machine()
        self._told: tuple[DeviceUse, ...] = ()
        self._reading: threading.Thread | None = None

    def look(self, devices: Sequence[Device]) -> tuple[DeviceUse, ...]:
        """What they do now; () while a reading takes long, and for devices that tell nothing."""
        wanted = [d for d in devices if d.backend in ("nvidia", "amd") and not d.emulated and not d.unavailable_reason]
        if not wanted:
            return ()
        if self._reading is None:
            self._told = ()
            reading = threading.Thread(target=self._read, args=(wanted,), name="use of devices", daemon=True)
            self._reading = reading  # which it empties as soon as it has ended
            reading.start()
            reading.join(WAIT_S)
        return self._told

    def _read(self, devices: Sequence[Device]) -> None:
        try:
            self._told = tuple(use for device in devices if (use := use_of(device, self._machine)) is not None)
        finally:
            self._reading = None


def use_of(device: Device, machine: Machine) -> DeviceUse | None:
    """None where its driver tells nothing."""
    if device.backend == "nvidia":
        told = nvidia_state.card_use(device.uuid) if device.uuid else {}
        return DeviceUse("nvidia", device.index, **told) if told else None
    return _amd(device, machine)


def _amd(device: Device, machine: Machine) -> DeviceUse | None:
    """Source: the kernel's Documentation/gpu/amdgpu/thermal.rst and driver-misc.rst; power in microwatts, heat in
    millidegrees. Partitions of one card share these files, and are told what the whole card does.
    """
    folder = f"sys/bus/pci/devices/{device.pci_address}"
    busy, used = machine.number(f"{folder}/gpu_busy_percent"), machine.number(f"{folder}/mem_info_vram_used")
    if not device.pci_address or (busy is None and used is None):
        return None
    power_uw, heat_mc = _sensor(machine, folder, "power1_average"), _sensor(machine, folder, "temp1_input")
    return DeviceUse(
        "amd",
        device.index,
        busy_percent=None if busy is None else float(busy),
        used_memory_bytes=used,
        power_w=None if power_uw is None else power_uw / 1e6,
        temperature_c=None if heat_mc is None else heat_mc / 1e3,
    )


def _sensor(machine: Machine, folder: str, name: str) -> int | None:
    found = machine.glob(f"{folder}/hwmon/hwmon*/{name}")
    return machine.number(found[0]) if found else None
