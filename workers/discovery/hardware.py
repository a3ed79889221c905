"""The local inventory as users of other libraries know it: HardwareDetector().detect() and its profile."""

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from cluster import catalogue
from cluster.catalogue.precision import INTEGERS
from cluster.types import Device, Finding
from workers.capability import probe_cache
from workers.capability.documented import documented_dtypes
from workers.device_info import DeviceInfo
from workers.discovery import discover
from workers.discovery.machine import Machine
from workers.discovery.traits import fp8_supported, traits
from workers.discovery.versions import versions
from workers.selection import device_preference


class HardwareProfile(BaseModel):
    """A machine. `hardware_type` and `device_name` are those of its best device, the others count all of that type."""

    model_config = ConfigDict(frozen=True)

    hardware_type: str
    device_name: str
    device_count: int
    total_memory_gb: float
    devices: tuple[DeviceInfo, ...]
    findings: tuple[Finding, ...]


class HardwareDetector:
    """Looks at the devices of a machine without opening one or importing torch."""

    def __init__(self, machine: Machine | None = None):
        self._machine = machine

    def detect(self) -> HardwareProfile:
        found, findings = discover(machine=self._machine)
        devices = device_infos(found, self._machine is None)
        best = device_preference.best(devices)
        alike = [d for d in devices if best is not None and d.backend == best.backend and d.is_available]
        return HardwareProfile(
            hardware_type=best.backend if best else "none",
            device_name=alike[0].device_name if alike else "",
            device_count=len(alike),
            total_memory_gb=sum(d.total_memory_gb for d in alike),
            devices=devices,
            findings=findings,
        )

    def get_optimal_backend(self, workload: Mapping[str, float] | None = None) -> str:
        """The back end of the best device; `workload` is measured throughput by kind, which overrules generations.

        Whether this environment's torch can use it is the question of workers.detect_best_backend.
        """
        best = device_preference.best(
            device_infos(discover(machine=self._machine)[0], self._machine is None), workload=workload
        )
        return best.backend if best else "none"


def device_infos(devices: Sequence[Device], of_this_machine: bool = True) -> tuple[DeviceInfo, ...]:
    """As torch will number them: usable devices of one back end from 0 on. Dtypes are what devices of this machine
    answered to probes, as far as they were asked.
    """
    runtime = {n: v for n, v in versions().items() if n not in ("python", "polyfleet", "ray")}
    seen: Counter[str] = Counter()
    told = []
    for device in devices:
        told.append(device_info(device, seen[device.backend], runtime, of_this_machine))
        seen[device.backend] += not device.unavailable_reason
    return tuple(told)


def device_info(device: Device, number: int, runtime: dict[str, str], of_this_machine: bool) -> DeviceInfo:
    """`number` is torch's; a device that cannot be used has none."""
    type_ = catalogue.vendor(device.backend).torch_device
    name = type_ if type_ == "cpu" else f"{type_}:{number}"
    is_sm = device.architecture.startswith("sm_")
    dtypes, found_by = _dtypes(device, of_this_machine)
    return DeviceInfo(
        backend=device.backend,
        device_type=type_ if device.unavailable_reason else name,
        device_id=device.index,
        device_name=device.name,
        kind=device.kind,
        uuid=device.uuid,
        architecture=device.architecture,
        compute_capability=f"{device.architecture[3:-1]}.{device.architecture[-1]}" if is_sm else "",
        total_memory_bytes=device.total_memory_bytes,
        free_memory_bytes=device.free_memory_bytes,
        integrated=device.integrated,
        unified_memory=device.unified_memory,
        driver_version=device.driver_version,
        runtime_versions=runtime,
        supported_dtypes=dtypes,
        dtypes_from=found_by,
        is_available=not device.unavailable_reason,
        unavailable_reason=device.unavailable_reason,
        emulated=device.emulated,
        pci_address=device.pci_address,
        numa_node=device.numa_node,
        fp8_supported=fp8_supported(dtypes) if dtypes else None,
        tpu_version=device.architecture if device.backend == "tpu" and not device.emulated else "",
        topology=str(device.properties.get("topology") or ""),
        properties=traits(device, dtypes) | device.properties,
    )


def _dtypes(device: Device, of_this_machine: bool) -> tuple[tuple[str, ...], str]:
    """Native dtypes, and how they are known: by what a device of this kind answered here, else by its documents."""
    asked = probe_cache.dtypes(device.kind) if of_this_machine else {}
    if asked:
        native = {name for name, answer in asked.items() if answer == "native"}
        return tuple(sorted(native | set(INTEGERS))), "probed"
    return documented_dtypes(device.backend, device.kind, device.architecture, device.properties), "documented"
