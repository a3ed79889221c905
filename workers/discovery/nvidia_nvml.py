"""What NVML says of this machine's cards, as JSON-like data. A call that fails costs what it would have answered.

Source: NVIDIA's NVML API reference and nvml.h, for the calls and for what their errors mean.
"""

from typing import Any

from cluster.types import Finding

NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, GPU_IS_LOST = 3, 4, 13, 15
UNUSABLE = frozenset({8, 11, GPU_IS_LOST, 16, 28})
"""Errors after which nothing computes on a card: no power, no interrupts, lost, to be reset, not found."""
MAX_CARDS = 64
MEMORY = "nvmlDeviceGetMemoryInfo"
COUNT = "nvmlDeviceGetCount"
HANDLE = "nvmlDeviceGetHandleByIndex"
SLICES = "nvmlDeviceGetMaxMigDeviceCount"

ANSWERS = {
    "nvmlSystemGetDriverVersion": "the driver's version",
    "nvmlSystemGetCudaDriverVersion_v2": "the CUDA version of the driver",
    COUNT: "how many cards there are",
    "nvmlDeviceGetName": "its name",
    "nvmlDeviceGetUUID": "its UUID",
    MEMORY: "its memory",
    "nvmlDeviceGetPciInfo": "its PCI address",
    "nvmlDeviceGetCudaComputeCapability": "its compute capability",
    "nvmlDeviceGetMigMode": "whether MIG is on",
    "nvmlDeviceGetEnforcedPowerLimit": "its power limit",
    "nvmlDeviceGetRemappedRows": "its spare memory rows",
    "nvmlDeviceGetTotalEccErrors": "its memory errors",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "why its clock is slowed",
    SLICES: "its MIG slices",
    "nvmlDeviceGetMigDeviceHandleByIndex": "one of its MIG slices",
}
"""What a call answers, in the words of a finding."""

OPTIONAL = frozenset({
    "nvmlDeviceGetMigMode", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetCurrentClocksThrottleReasons",
})  # fmt: skip
"""Calls that many healthy cards do not support."""
NOT_SO = frozenset({NOT_SUPPORTED, 6, 22})
"""Not supported, not found, no ECC in a virtual GPU: the card has no such thing."""

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
    18: "reboot, so that the loaded driver and its libraries are of one version",
    25: "install the nvidia-ml-py of the driver's release",
    26: "install the nvidia-ml-py of the driver's release",
    28: "reboot the machine; if the card stays away, have its seat and power checked",
}
OTHERWISE = "run nvidia-smi by hand; a reset of the card, a reboot or another driver may be needed"


class Calls:
    """Calls NVML's functions by name, with `given` first. `failed` has those without an answer: name -> (code, words).

    After an error that ends the card's use no more is asked of it: each call would wait for the card again.
    """

    def __init__(self, nvml: Any, *given: Any):
        self._nvml, self._given = nvml, given
        self.failed: dict[str, tuple[int, str]] = {}

    def __call__(self, name: str, *more: Any) -> Any:
        """None where there is no answer."""
        if unusable_reason(self.failed):
            return None
        function = getattr(self._nvml, name, None)
        if function is None:
            self.failed[name] = (FUNCTION_NOT_FOUND, "nvidia-ml-py has no such function")
            return None
        try:
            return function(*self._given, *more)
        except self._nvml.NVMLError as e:
            self.failed[name] = (getattr(e, "value", 0), str(e))
        except UnicodeDecodeError:
            self.failed[name] = (0, "the answer is not text")
        return None


def ask(nvml: Any) -> dict[str, Any]:
    """{"driver", "cuda", "cards": […], "failed": {call: (code, words)}}, or {"error", "code"} where NVML cannot start.

    A card has `failed` of its own, and so has a MIG slice; what failed is None there. One that NVML gives no handle of
    has its index only. `nvml` is the module of nvidia-ml-py.
    """
    system = Calls(nvml)
    system("nvmlInit")
    if "nvmlInit" in system.failed:
        code, words = system.failed["nvmlInit"]
        return {"error": f"nvmlInit failed: {words}", "code": code}
    count = system(COUNT)
    indices = range(_reachable(nvml) if count is None else count)
    cards = [_ask_card(nvml, index) for index in indices]
    driver, cuda = system("nvmlSystemGetDriverVersion"), _cuda_version(system)
    return {
        "driver": driver or "",
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        "cards": cards,
        "failed": system.failed,
    }


def _reachable(nvml: Any) -> int:
    """How many cards in a row NVML gives a handle of, where it does not report their number."""
    handles, index = Calls(nvml), 0
    while index < MAX_CARDS and handles(HANDLE, index) is not None:
        index += 1
    return index


def _cuda_version(system: Calls) -> int | None:
    """Drivers before R418 have the first of the two functions only."""
    newer, older = "nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"
    version: int | None = system(newer)
    if system.failed.get(newer, (0, ""))[0] == FUNCTION_NOT_FOUND and (version := system(older)) is not None:
        del system.failed[newer]
    system.failed.pop(older, None)
    return version


def _ask_card(nvml: Any, index: int) -> dict[str, Any]:
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
        "slices": _ask_slices(nvml, handle, call) if mig and mig[0] else [],
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


def _ask_slices(nvml: Any, handle: Any, card: Calls) -> list[dict[str, Any]]:
    """Of a card on which MIG is on. A number for which NVML finds nothing is a place where no slice has been made."""
    found = []
    for number in range(card(SLICES) or 0):
        handles = Calls(nvml, handle)
        part = handles("nvmlDeviceGetMigDeviceHandleByIndex", number)
        card.failed |= {name: why for name, why in handles.failed.items() if why[0] not in NOT_SO}
        if part is not None:
            call = Calls(nvml, part)
            found.append({**_identity(call), "failed": call.failed})
    return found


def remedy(code: int) -> str:
    return REMEDIES.get(code, OTHERWISE)


def unusable_reason(failed: dict[str, tuple[int, str]]) -> str:
    """Why nothing computes on a card of which these calls failed; "" where only their answers are missing."""
    for name, (code, words) in failed.items():
        if _ends_use(name, code):
            return f"{name} failed: {words}; {remedy(code)}"
    return ""


def _ends_use(name: str, code: int) -> bool:
    of_a_card = name.startswith("nvmlDevice") and name != COUNT
    return name == HANDLE or (of_a_card and code in UNUSABLE)


def findings(failed: dict[str, dict[str, tuple[int, str]]]) -> list[Finding]:
    """`failed` calls by card (or "this machine"). Cards on which a call failed alike share a finding. There is none for
    what a healthy card may lack.
    """
    alike: dict[tuple[str, int, str], list[str]] = {}
    for who, calls in failed.items():
        for name, (code, words) in calls.items():
            if not (code in NOT_SO and name in OPTIONAL):
                alike.setdefault((name, code, words), []).append(who)
    return [_finding(", ".join(who), *call) for call, who in alike.items()]


def _finding(who: str, name: str, code: int, words: str) -> Finding:
    said = f"{name} failed: {words}"
    if _ends_use(name, code):
        return Finding("error", "nvidia", f"{who} cannot be used: {said}", remedy(code))
    level = "info" if name in OPTIONAL or name not in ANSWERS else "warning"
    return Finding(level, "nvidia", f"{who}: NVML did not report {ANSWERS.get(name, 'all data')}: {said}", remedy(code))
