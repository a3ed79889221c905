"""Current utilization of a node's accelerators, from their drivers, without opening a device.

NVIDIA: NVML. AMD: amdgpu's files in sysfs (`gpu_busy_percent`, `mem_info_vram_used`). Other vendors report it only by
tools whose start takes too long.
"""

import threading
from collections.abc import Sequence

from cluster.types import Device, DeviceUse
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.vendors import nvidia_state

WAIT_S = 0.05
"""Longest wait for a reading, which usually takes 1 ms per device. A late one is reported with the next facts."""


class LiveUse:
    """Reads utilization in a thread. If a driver hangs, that one thread remains and no other is started."""

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine or Machine()
        self._newest: tuple[DeviceUse, ...] = ()
        self._reading: threading.Thread | None = None

    def current(self, devices: Sequence[Device]) -> tuple[DeviceUse, ...]:
        """Read the current utilization; () while a reading is late, and for devices without one."""
        readable = [
            d for d in devices if d.backend in ("nvidia", "amd") and not d.emulated and not d.unavailable_reason
        ]
        if not readable:
            return ()
        if self._reading is None:
            self._newest = ()
            reading = threading.Thread(target=self._read, args=(readable,), name="use of devices", daemon=True)
            self._reading = reading  # the thread resets it when it ends
            reading.start()
            reading.join(WAIT_S)
        return self._newest

    def _read(self, devices: Sequence[Device]) -> None:
        try:
            self._newest = tuple(use for device in devices if (use := use_of(device, self._machine)) is not None)
        finally:
            self._reading = None


def use_of(device: Device, machine: Machine) -> DeviceUse | None:
    """Utilization of one device, None if its driver reports nothing."""
    if device.backend == "nvidia":
        reading = nvidia_state.card_use(device.uuid) if device.uuid else {}
        return DeviceUse("nvidia", device.index, **reading) if reading else None
    return _amd(device, machine)


def _amd(device: Device, machine: Machine) -> DeviceUse | None:
    """Utilization of an AMD device. Partitions of a card share its files, so each gets the values of the full card.

    sysfs has power in microwatts and temperature in millidegrees. Source: the kernel's
    Documentation/gpu/amdgpu/thermal.rst and driver-misc.rst.
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
    files = machine.glob(f"{folder}/hwmon/hwmon*/{name}")
    return machine.number(files[0]) if files else None
