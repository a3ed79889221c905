"""Query NVML about this machine's cards, as JSON-like data. A failed call makes only its own values unknown.

Source: NVIDIA's NVML API reference and nvml.h, for the calls and for what their errors mean.
"""

from typing import Any

from cluster.types import Finding

NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, GPU_IS_LOST = 3, 4, 13, 15
UNUSABLE = frozenset({8, 11, GPU_IS_LOST, 16, 28})
"""Errors that make a card unusable: no power, no interrupts, lost, reset required, not found."""
MAX_CARDS = 64
MEMORY = "nvmlDeviceGetMemoryInfo"
COUNT = "nvmlDeviceGetCount"
HANDLE = "nvmlDeviceGetHandleByIndex"
SLICES = "nvmlDeviceGetMaxMigDeviceCount"

CALL_RESULTS = {
    "nvmlSystemGetDriverVersion": "the driver's version",
    "nvmlSystemGetCudaDriverVersion_v2": "the CUDA version of the driver",
    COUNT: "the number of cards",
    "nvmlDeviceGetName": "its name",
    "nvmlDeviceGetUUID": "its UUID",
    MEMORY: "its memory",
    "nvmlDeviceGetPciInfo": "its PCI address",
    "nvmlDeviceGetCudaComputeCapability": "its compute capability",
    "nvmlDeviceGetMigMode": "whether MIG is on",
    "nvmlDeviceGetEnforcedPowerLimit": "its power limit",
    "nvmlDeviceGetRemappedRows": "its spare memory rows",
    "nvmlDeviceGetTotalEccErrors": "its memory errors",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "why its clock is throttled",
    SLICES: "its MIG slices",
    "nvmlDeviceGetMigDeviceHandleByIndex": "one of its MIG slices",
}
"""What each call returns, as findings name it."""

OPTIONAL = frozenset({
    "nvmlDeviceGetMigMode", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetCurrentClocksThrottleReasons",
})  # fmt: skip
"""Calls that many healthy cards do not support."""
MISSING_FEATURE_CODES = frozenset({NOT_SUPPORTED, 6, 22})
"""Errors that mean the card lacks the feature: not supported, not found, no ECC in a virtual GPU."""

REMEDIES = {
    NO_PERMISSION: "run as a user, or in a container, that may use /dev/nvidia*",
    8: "connect the card's power cables",
    9: "load NVIDIA's driver: modprobe nvidia",
    10: "run nvidia-smi by hand; if it hangs too, reboot the machine",
    11: "reboot the machine; if it comes back, look for the card's interrupts in dmesg",
    12: "install the libraries of NVIDIA's driver, libnvidia-ml.so among them",
    FUNCTION_NOT_FOUND: "update NVIDIA's driver: it is older than nvidia-ml-py",
    14: "have the card checked: its configuration memory (infoROM) is damaged",
    GPU_IS_LOST: "reboot the machine; if the card is lost again, have its seat and power checked",
    16: "reset it with nvidia-smi --gpu-reset, or reboot the machine",
    17: "let this container or control group use the card's device files",
    18: "reboot, so that the loaded driver and its libraries have the same version",
    25: "install the nvidia-ml-py of the driver's release",
    26: "install the nvidia-ml-py of the driver's release",
    28: "reboot the machine; if the card stays away, have its seat and power checked",
}
DEFAULT_REMEDY = "run nvidia-smi by hand; a reset of the card, a reboot or another driver may be needed"


class Calls:
    """Calls NVML's functions by name, with `arguments` first. `failed` has failed calls: name -> (code, message).

    After an error that makes the card unusable, it makes no further calls: each would wait for the card again.
    """

    def __init__(self, nvml: Any, *arguments: Any):
        self._nvml, self._arguments = nvml, arguments
        self.failed: dict[str, tuple[int, str]] = {}

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call a function; None if it fails."""
        if unusable_reason(self.failed):
            return None
        function = getattr(self._nvml, name, None)
        if function is None:
            self.failed[name] = (FUNCTION_NOT_FOUND, "nvidia-ml-py has no such function")
            return None
        try:
            return function(*self._arguments, *arguments)
        except self._nvml.NVMLError as e:
            self.failed[name] = (getattr(e, "value", 0), str(e))
        except UnicodeDecodeError:
            self.failed[name] = (0, "the reply is not text")
        return None


def query(nvml: Any) -> dict[str, Any]:
    """Return {"driver", "cuda", "cards": […], "failed": {call: (code, message)}}, or {"error", "code"} if NVML fails.

    Each card and each MIG slice has its own `failed`; values of failed calls are None. A card without a handle has only
    its index. `nvml` is the module of nvidia-ml-py.
    """
    system = Calls(nvml)
    system("nvmlInit")
    if "nvmlInit" in system.failed:
        code, message = system.failed["nvmlInit"]
        return {"error": f"nvmlInit failed: {message}", "code": code}
    count = system(COUNT)
    indices = range(_count_handles(nvml) if count is None else count)
    cards = [_query_card(nvml, index) for index in indices]
    driver, cuda = system("nvmlSystemGetDriverVersion"), _cuda_version(system)
    return {
        "driver": driver or "",
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        "cards": cards,
        "failed": system.failed,
    }


def _count_handles(nvml: Any) -> int:
    """Count cards by requesting handles until one fails, for an NVML that does not report their number."""
    handles, index = Calls(nvml), 0
    while index < MAX_CARDS and handles(HANDLE, index) is not None:
        index += 1
    return index


def _cuda_version(system: Calls) -> int | None:
    """CUDA version of the driver. Drivers before R418 have only the older of the two functions."""
    newer, older = "nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"
    version: int | None = system(newer)
    if system.failed.get(newer, (0, ""))[0] == FUNCTION_NOT_FOUND and (version := system(older)) is not None:
        del system.failed[newer]
    system.failed.pop(older, None)
    return version


def _query_card(nvml: Any, index: int) -> dict[str, Any]:
    handles = Calls(nvml)
    handle = handles(HANDLE, index)
    if HANDLE in handles.failed:
        return {"index": index, "failed": handles.failed}
    call = Calls(nvml, handle)
    identity = _identity(call)
    pci, mig = call("nvmlDeviceGetPciInfo"), call("nvmlDeviceGetMigMode")
    power_mw = call("nvmlDeviceGetEnforcedPowerLimit")
    remapped = call("nvmlDeviceGetRemappedRows")
    uncorrected, since_boot = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    combined_id = getattr(pci, "pciDeviceId", None)  # the device above the vendor, 16 bits each
    return {
        "index": index,
        **identity,
        "pci": pci.busId if pci else "",
        "pci_device": combined_id >> 16 if combined_id else None,
        "capability": call("nvmlDeviceGetCudaComputeCapability"),
        "mig": bool(mig and mig[0]),
        "slices": _query_slices(nvml, handle, call) if mig and mig[0] else [],
        "ecc_uncorrected": call("nvmlDeviceGetTotalEccErrors", uncorrected, since_boot),
        "row_remap_failed": bool(remapped and remapped[3]),
        "slowed": call("nvmlDeviceGetCurrentClocksThrottleReasons"),
        "power_limit_w": power_mw and power_mw / 1000,
        "failed": call.failed,
    }


def _identity(call: Calls) -> dict[str, Any]:
    name, uuid, memory = (call(f"nvmlDeviceGet{what}") for what in ("Name", "UUID", "MemoryInfo"))
    return {
        "name": name or "",
        "uuid": uuid or "",
        "total_bytes": memory and memory.total,
        "free_bytes": memory and memory.free,
    }


def _query_slices(nvml: Any, handle: Any, card: Calls) -> list[dict[str, Any]]:
    """Query the slices of a card with MIG on. NVML finds nothing for the number of a slice that was not created."""
    slices = []
    for number in range(card(SLICES) or 0):
        handles = Calls(nvml, handle)
        part = handles("nvmlDeviceGetMigDeviceHandleByIndex", number)
        card.failed |= {name: error for name, error in handles.failed.items() if error[0] not in MISSING_FEATURE_CODES}
        if part is not None:
            call = Calls(nvml, part)
            slices.append({**_identity(call), "failed": call.failed})
    return slices


def remedy(code: int) -> str:
    return REMEDIES.get(code, DEFAULT_REMEDY)


def unusable_reason(failed: dict[str, tuple[int, str]]) -> str:
    """Return why a card with these failed calls is unusable; "" if only some values are missing."""
    for name, (code, message) in failed.items():
        if _ends_use(name, code):
            return f"{name} failed: {message}; {remedy(code)}"
    return ""


def _ends_use(name: str, code: int) -> bool:
    of_a_card = name.startswith("nvmlDevice") and name != COUNT
    return name == HANDLE or (of_a_card and code in UNUSABLE)


def findings(failed: dict[str, dict[str, tuple[int, str]]]) -> list[Finding]:
    """Report failed calls. `failed` has them by card (or "this machine"). Cards with the same failure share a finding.

    Calls that a healthy card may not support are not reported.
    """
    cards_by_failure: dict[tuple[str, int, str], list[str]] = {}
    for label, calls in failed.items():
        for name, (code, message) in calls.items():
            if not (code in MISSING_FEATURE_CODES and name in OPTIONAL):
                cards_by_failure.setdefault((name, code, message), []).append(label)
    return [_finding(", ".join(label), *call) for call, label in cards_by_failure.items()]


def _finding(label: str, name: str, code: int, message: str) -> Finding:
    problem = f"{name} failed: {message}"
    if _ends_use(name, code):
        return Finding("error", "nvidia", f"{label} cannot be used: {problem}", remedy(code))
    level = "info" if name in OPTIONAL or name not in CALL_RESULTS else "warning"
    return Finding(
        level, "nvidia", f"{label}: NVML did not report {CALL_RESULTS.get(name, 'all data')}: {problem}", remedy(code)
    )
