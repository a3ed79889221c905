"""Inventory of the local machine: HardwareDetector().detect() returns a HardwareProfile."""

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from cluster import catalogue
from cluster.catalogue.precision import INTEGERS
from cluster.types import Device, Finding
from workers.devices.capability import probe_cache
from workers.devices.capability.device_info import DeviceInfo
from workers.devices.capability.documented import documented_dtypes
from workers.devices.capability.traits import fp8_supported, traits
from workers.devices.discovery import discover
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.versions import versions
from workers.options import device_preference


class HardwareProfile(BaseModel):
    """The devices of a machine.

    `hardware_type` (a back end) and `device_name` are those of its best device. `device_count` and `total_memory_gb`
    cover all usable devices of that back end.
    """

    model_config = ConfigDict(frozen=True)

    hardware_type: str
    device_name: str
    device_count: int
    total_memory_gb: float
    devices: tuple[DeviceInfo, ...]
    findings: tuple[Finding, ...]


class HardwareDetector:
    """Detects the devices of a machine without opening one or importing torch."""

    def __init__(self, machine: Machine | None = None):
        self._machine = machine

    def detect(self) -> HardwareProfile:
        detected, findings = discover(machine=self._machine)
        devices = device_infos(detected, self._machine is None)
        best = device_preference.best(devices)
        same_backend = [d for d in devices if best is not None and d.backend == best.backend and d.is_available]
        return HardwareProfile(
            hardware_type=best.backend if best else "none",
            device_name=same_backend[0].device_name if same_backend else "",
            device_count=len(same_backend),
            total_memory_gb=sum(d.total_memory_gb for d in same_backend),
            devices=devices,
            findings=findings,
        )

    def get_optimal_backend(self, workload: Mapping[str, float] | None = None) -> str:
        """Backend of the best device; `workload` is measured throughput by kind, which overrides generations.

        Does not check that this environment's torch can use it: workers.detect_best_backend does.
        """
        best = device_preference.best(
            device_infos(discover(machine=self._machine)[0], self._machine is None), workload=workload
        )
        return best.backend if best else "none"


def device_infos(devices: Sequence[Device], of_this_machine: bool = True) -> tuple[DeviceInfo, ...]:
    """Describe devices, numbered like torch: the usable devices of each backend from 0.

    Dtypes come from cached probes on this machine, if there are any, else from the catalogue.
    """
    runtime = {n: v for n, v in versions().items() if n not in ("python", "polyfleet", "ray")}
    next_number: Counter[str] = Counter()
    infos = []
    for device in devices:
        infos.append(device_info(device, next_number[device.backend], runtime, of_this_machine))
        next_number[device.backend] += not device.unavailable_reason
    return tuple(infos)


def device_info(device: Device, number: int, runtime: dict[str, str], of_this_machine: bool) -> DeviceInfo:
    """Describe one device. `number` is torch's number, ignored for a device that cannot be used."""
    type_ = catalogue.vendor(device.backend).torch_device
    name = type_ if type_ == "cpu" else f"{type_}:{number}"
    is_sm = device.architecture.startswith("sm_")
    dtypes, dtypes_from = _dtypes(device, of_this_machine)
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
        dtypes_from=dtypes_from,
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
    """Return the native dtypes and their origin: `probed` on a device of this kind here, else `documented`."""
    probed = probe_cache.dtypes(device.kind) if of_this_machine else {}
    if probed:
        native = {name for name, support in probed.items() if support == "native"}
        return tuple(sorted(native | set(INTEGERS))), "probed"
    return documented_dtypes(device.backend, device.kind, device.architecture, device.properties), "documented"
