"""Current state of an NVIDIA card from NVML: energy, clocks, temperature, and the processes that use it.

Source: NVML API reference.
"""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

from cluster.catalogue.device_metrics import BENCHMARK_METRICS, LIVE_METRICS, DeviceMetric
from workers.devices.discovery.vendors.nvidia import THROTTLE_CAUSES
from workers.devices.discovery.vendors.nvidia_nvml import Calls

MISSING = "nvidia-ml-py is not installed in this environment"


def energy_reader(uuid: str) -> tuple[str, Callable[[], float] | None]:
    """Return (source, function that reads joules since the driver was loaded), or (reason, None).

    Source: nvmlDeviceGetTotalEnergyConsumption, millijoules, Volta and newer.
    """
    if find_spec("pynvml") is None:
        return MISSING, None
    import pynvml

    try:
        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByUUID(_as_nvml(uuid))
        pynvml.nvmlDeviceGetTotalEnergyConsumption(card)
    except pynvml.NVMLError as e:
        return f"NVML has no energy counter: {e}", None
    return "NVML total energy", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3


def card_state(uuid: str) -> dict[str, Any]:
    """Return BENCHMARK_METRICS by name, "slowed_by": [causes], and "pids": [compute processes].

    Values that the card does not report are None; {} without NVML.
    """
    nvml, card = _card(uuid)
    return read_card(nvml, card) if nvml else {}


def card_use(uuid: str) -> dict[str, Any]:
    """Return LIVE_METRICS by name; None and {} as for `card_state`. A MIG slice reports only its memory."""
    nvml, card = _card(uuid)
    return read_use(nvml, card) if nvml else {}


def read_use(nvml: Any, card: Any) -> dict[str, Any]:
    return _read(nvml, Calls(nvml, card), LIVE_METRICS)


def _read(nvml: Any, call: Calls, metrics: Iterable[DeviceMetric]) -> dict[str, Any]:
    return {metric.name: _value(nvml, call, metric) for metric in metrics}


def _value(nvml: Any, call: Calls, metric: DeviceMetric) -> float | None:
    if (source := metric.nvidia) is None:
        return None
    reply = call(source.function, *((getattr(nvml, source.constant),) if source.constant else ()))
    if reply is None:
        return None
    return metric.convert(getattr(reply, source.attribute) if source.attribute else reply, source.divisor)


def _card(uuid: str) -> tuple[Any, Any]:
    """Return (pynvml, the card's handle), or (None, None) without NVML."""
    if find_spec("pynvml") is None:
        return None, None
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        return nvml, nvml.nvmlDeviceGetHandleByUUID(_as_nvml(uuid))
    except nvml.NVMLError:
        return None, None


def _as_nvml(uuid: str) -> str:
    """Add the prefix that NVML requires: torch reports a card's UUID without it."""
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def read_card(nvml: Any, card: Any) -> dict[str, Any]:
    call = Calls(nvml, card)
    slowed = call("nvmlDeviceGetCurrentClocksThrottleReasons")
    return _read(nvml, call, BENCHMARK_METRICS) | {
        "slowed_by": [cause for bit, cause in THROTTLE_CAUSES.items() if slowed and slowed & bit],
        "pids": [process.pid for process in call("nvmlDeviceGetComputeRunningProcesses") or []],
    }
