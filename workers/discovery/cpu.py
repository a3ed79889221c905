"""The CPU of this node, taken as one device or split into POLYFLEET_DEVICES equal ones."""

import platform
from importlib.util import find_spec

from cluster.vocabulary import Device, Finding, Scalar
from workers.discovery.limits import cores, memory
from workers.discovery.machine import Machine

# What decides which dtypes are quick: without avx512_fp16 or AMX, float16 matmul is ~180 times slower than bfloat16.
TOLD_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16", "sve", "bf16")


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    engine = machine.environ.get("POLYFLEET_CPU_ENGINE", "")
    reason = ""
    if engine == "ipex" and find_spec("intel_extension_for_pytorch") is None:
        reason = "POLYFLEET_CPU_ENGINE=ipex, but intel-extension-for-pytorch is not in this environment"
    kind = f"cpu:{engine}" if engine else "cpu"
    return split("cpu", kind, name(machine), machine, unavailable_reason=reason), []


def split(
    backend: str, kind: str, title: str, machine: Machine, *, emulated: bool = False, unavailable_reason: str = ""
) -> list[Device]:
    """The CPU as so many equal devices: their memory is shared by counting, not by force."""
    parts = max(1, int(machine.environ.get("POLYFLEET_DEVICES") or 1))
    total, free = memory(machine)
    shared: dict[str, Scalar] = {"cores": cores(machine), "devices_share_cores": parts > 1}
    return [
        Device(
            backend=backend,
            kind=kind,
            index=i,
            name=title,
            total_memory_bytes=total // parts,
            free_memory_bytes=free // parts,
            architecture=platform.machine(),
            emulated=emulated,
            unavailable_reason=unavailable_reason,
            properties=shared | _flags(machine),
        )
        for i in range(parts)
    ]


def name(machine: Machine) -> str:
    """The model as the kernel tells it."""
    for line in machine.text("proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _flags(machine: Machine) -> dict[str, Scalar]:
    for line in machine.text("proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            present = set(value.split())
            return {flag: flag in present for flag in TOLD_FLAGS if flag in present}
    return {}
