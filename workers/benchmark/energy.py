"""Measure energy with hardware counters: NVML, AMD SMI and RAPL. Without a counter, no value is reported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workers.devices.backends.base import BaseBackend

POWERCAP = Path("/sys/class/powercap")
Counter = Callable[[], float]
"""Joules since an arbitrary moment; only differences are meaningful."""


def counter(backend: BaseBackend, powercap: Path = POWERCAP) -> tuple[str, Counter | None]:
    """Return (source of the energy value, reader), or (reason, None) if there is no counter."""
    if backend.BACKEND_NAME == "nvidia":
        return _nvml(backend)
    if backend.BACKEND_NAME == "amd":
        return _amd_smi(backend)
    if backend.BACKEND_NAME == "cpu":
        return _rapl(powercap)
    return f"reading energy counters of {backend.BACKEND_NAME} is not supported", None


def _nvml(backend: BaseBackend) -> tuple[str, Counter | None]:
    """Total energy since the driver was loaded, in millijoules; Volta and newer. Source: NVML API reference."""
    from workers.devices.discovery.vendors.nvidia_state import energy_reader

    return energy_reader(str(backend.get_device_info(backend.device_id).uuid))


def _amd_smi(backend: BaseBackend) -> tuple[str, Counter | None]:
    from workers.devices.discovery.vendors.amd_smi import energy_reader

    card: Any = torch.cuda.get_device_properties(backend.device)
    return energy_reader(f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0")


def _rapl(powercap: Path) -> tuple[str, Counter | None]:
    """Read CPU packages only: they include their sub-domains. Only root may read them (CVE-2020-8694)."""
    files = sorted(powercap.glob("intel-rapl:[0-9]*/energy_uj"))
    files = [f for f in files if f.parent.name.count(":") == 1]
    if not files:
        return "this machine has no powercap counters", None
    try:
        for file in files:
            file.read_text()
    except OSError as e:
        return f"{files[0]} cannot be read: {e.strerror}", None
    return "RAPL, all packages", _Rapl(files)


class _Rapl:
    """Sum of microjoule counters, each of which wraps around at `max_energy_range_uj`."""

    def __init__(self, files: list[Path]):
        self._files = files
        self._ranges = [int((f.parent / "max_energy_range_uj").read_text()) for f in files]
        self._last = [int(f.read_text()) for f in files]
        self._joules = 0.0

    def __call__(self) -> float:
        now = [int(f.read_text()) for f in self._files]
        steps = zip(now, self._last, self._ranges, strict=True)
        self._joules += sum((new - old) % limit for new, old, limit in steps) / 1e6
        self._last = now
        return self._joules
