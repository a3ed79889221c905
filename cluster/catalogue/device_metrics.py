"""Metrics of a device that its driver gives without the device being opened, one row each.

To add a metric: a row here. Agents, `polyfleet top`, benchmarks and docs/reference/metrics.md read this table.
Energy counters are not among them: a benchmark reads them over an interval (workers/benchmark/energy.py).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NvmlCall:
    """Call of NVML: a function, the constant that it takes, and the attribute of its reply ("" if there is none).

    `divisor` converts the value to the metric's unit. Source: NVML API reference.
    """

    function: str
    constant: str = ""
    attribute: str = ""
    divisor: int = 1


@dataclass(frozen=True, slots=True)
class SysfsFile:
    """File below the folder of a PCI device in sysfs; of several that match a `*`, the first.

    `divisor` converts its number to the metric's unit. Source: the kernel's Documentation/gpu/amdgpu/thermal.rst and
    driver-misc.rst.
    """

    path: str
    divisor: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMetric:
    """A metric; its name ends in its unit.

    `heading`: its heading in `polyfleet top`, "" if agents do not send it. `unit`: `%` is displayed as a bar, `B` as
    a part of the device's memory, any other after the number. `is_integer`: its values are integers, else floats.
    `in_benchmarks`: benchmarks record it around a measurement. `nvidia`, `amd`: how it is read, None if it cannot be.
    """

    name: str
    meaning: str
    unit: str
    heading: str = ""
    is_integer: bool = False
    in_benchmarks: bool = False
    nvidia: NvmlCall | None = None
    amd: SysfsFile | None = None

    def convert(self, raw: float, divisor: int) -> float:
        """Convert a value of a driver to the unit of this metric."""
        return int(raw) // divisor if self.is_integer else float(raw) / divisor


DEVICE_METRICS = (
    DeviceMetric(
        name="busy_percent",
        meaning="share of the last moments in which the device computed; of a CPU, its node's load per core",
        unit="%",
        heading="BUSY",
        nvidia=NvmlCall("nvmlDeviceGetUtilizationRates", attribute="gpu"),
        amd=SysfsFile("gpu_busy_percent"),
    ),
    DeviceMetric(
        name="used_memory_bytes",
        meaning="memory in use by all programs; of a CPU, that of its node",
        unit="B",
        heading="MEMORY",
        is_integer=True,
        nvidia=NvmlCall("nvmlDeviceGetMemoryInfo", attribute="used"),
        amd=SysfsFile("mem_info_vram_used"),
    ),
    DeviceMetric(
        name="power_w",
        meaning="power that the card draws",
        unit="W",
        heading="POWER",
        in_benchmarks=True,
        nvidia=NvmlCall("nvmlDeviceGetPowerUsage", divisor=1000),
        amd=SysfsFile("hwmon/hwmon*/power1_average", divisor=1_000_000),
    ),
    DeviceMetric(
        name="temperature_c",
        meaning="temperature of the chip",
        unit="°C",
        heading="HEAT",
        in_benchmarks=True,
        nvidia=NvmlCall("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
        amd=SysfsFile("hwmon/hwmon*/temp1_input", divisor=1000),
    ),
    DeviceMetric(
        name="sm_mhz",
        meaning="clock of the processors",
        unit="MHz",
        is_integer=True,
        in_benchmarks=True,
        nvidia=NvmlCall("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
    ),
    DeviceMetric(
        name="memory_mhz",
        meaning="clock of the memory",
        unit="MHz",
        is_integer=True,
        in_benchmarks=True,
        nvidia=NvmlCall("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
    ),
)

LIVE_METRICS = tuple(metric for metric in DEVICE_METRICS if metric.heading)
"""Metrics that agents send, in the order of `polyfleet top`."""
BENCHMARK_METRICS = tuple(metric for metric in DEVICE_METRICS if metric.in_benchmarks)
