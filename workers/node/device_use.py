"""Current metrics of a node's accelerators, from their drivers, without opening a device.

NVIDIA: NVML. AMD: amdgpu's files in sysfs. Other vendors report them only by tools whose start takes too long.
"""

import threading
from collections.abc import Callable, Sequence

from cluster.catalogue.device_metrics import LIVE_METRICS, SysfsFile
from cluster.types import Device, DeviceUse
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.vendors import nvidia_state

Metrics = dict[str, float | None]
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
        readable = [d for d in devices if d.backend in READERS and not d.emulated and not d.unavailable_reason]
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
    """Metrics of one device, None if its driver reports none."""
    metrics = READERS[device.backend](device, machine)
    return DeviceUse(device.backend, device.index, metrics) if metrics else None


def _read_nvidia(device: Device, machine: Machine) -> Metrics:
    return nvidia_state.card_use(device.uuid) if device.uuid else {}


def _read_amd(device: Device, machine: Machine) -> Metrics:
    """Metrics of an AMD device. Partitions of a card share its files, so each gets the values of the full card."""
    folder = f"sys/bus/pci/devices/{device.pci_address}"
    metrics: Metrics = {}
    for metric in LIVE_METRICS if device.pci_address else ():
        raw = _number(machine, folder, metric.amd) if metric.amd else None
        metrics[metric.name] = None if raw is None or metric.amd is None else metric.convert(raw, metric.amd.divisor)
    return metrics if any(value is not None for value in metrics.values()) else {}


def _number(machine: Machine, folder: str, file: SysfsFile) -> int | None:
    path = f"{folder}/{file.path}"
    files = machine.glob(path) if "*" in path else [path]
    return machine.number(files[0]) if files else None


READERS: dict[str, Callable[[Device, Machine], Metrics]] = {"nvidia": _read_nvidia, "amd": _read_amd}
"""By back end: a function that reads LIVE_METRICS; {} if the driver reports none."""
