"""The CPU of this node, as one device or split into POLYFLEET_DEVICES equal ones."""

import platform
import re

from cluster.types import Device, Finding, Scalar
from workers.devices.discovery.machine import Machine, tool_output
from workers.devices.discovery.resource_limits import cores, memory
from workers.processes.interpreter import has

# Flags that decide which dtypes are fast: without avx512_fp16 or AMX, float16 matmul is 180 times slower than bfloat16.
REPORTED_FLAGS = (
    *("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("neon", "asimd", "asimdhp", "sve", "sve2", "bf16", "i8mm"),
)


def present(machine: Machine) -> bool:
    return True


def find(machine: Machine) -> tuple[list[Device], list[Finding]]:
    engine = machine.environ.get("POLYFLEET_CPU_ENGINE", "")
    reason = ""
    if engine == "ipex" and not has("intel_extension_for_pytorch"):
        reason = "POLYFLEET_CPU_ENGINE=ipex, but intel-extension-for-pytorch is not installed in this environment"
    kind = f"cpu:{engine}" if engine else "cpu"
    return split("cpu", kind, name(machine), machine, unavailable_reason=reason), []


def split(
    backend: str, kind: str, title: str, machine: Machine, *, emulated: bool = False, unavailable_reason: str = ""
) -> list[Device]:
    """Split the CPU into POLYFLEET_DEVICES equal devices. Their shares of memory are accounted for, not enforced."""
    parts = max(1, int(machine.environ.get("POLYFLEET_DEVICES") or 1))
    total, free = memory(machine)
    shared: dict[str, Scalar] = {"cores": cores(machine), "devices_share_cores": parts > 1, **topology(machine)}
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
            unified_memory=True,
            unavailable_reason=unavailable_reason,
            properties=shared | instruction_sets(machine),
        )
        for i in range(parts)
    ]


def name(machine: Machine) -> str:
    """Model of the CPU as reported by the kernel."""
    if machine.system == "Darwin":
        output, _ = tool_output(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], machine.environ)
        return output.strip() or platform.machine()
    for line in machine.text("proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def topology(machine: Machine) -> dict[str, Scalar]:
    """Sockets, physical cores, logical CPUs, NUMA nodes and caches of the machine.

    Those that this process may not use are included. Values that the kernel does not report (sockets on most Arm
    machines) are missing.
    """
    info = [line.partition(":") for line in machine.text("proc/cpuinfo").splitlines()]
    entries = [(key.strip(), value.strip()) for key, _, value in info]
    sockets = {value for key, value in entries if key == "physical id"}
    per_socket = next((int(value) for key, value in entries if key == "cpu cores"), 0)
    counts: dict[str, Scalar] = {
        "logical_cpus": sum(key == "processor" for key, _ in entries),
        "sockets": len(sockets),
        "physical_cores": len(sockets) * per_socket,
        "numa_nodes": len(machine.glob("sys/devices/system/node/node[0-9]*")),
    }
    return {name: value for name, value in counts.items() if value} | _caches(machine)


def _caches(machine: Machine) -> dict[str, Scalar]:
    """Sizes of the first CPU's caches in bytes: `l1d_bytes`, `l2_bytes`, `l3_bytes`."""
    sizes: dict[str, Scalar] = {}
    for folder in machine.glob("sys/devices/system/cpu/cpu0/cache/index[0-9]*"):
        level, kind = machine.text(f"{folder}/level"), machine.text(f"{folder}/type")
        size = re.fullmatch(r"(\d+)([KMG])", machine.text(f"{folder}/size"))
        if size and kind != "Instruction":
            name = f"l{level}{'d' if kind == 'Data' else ''}_bytes"
            sizes[name] = int(size[1]) << {"K": 10, "M": 20, "G": 30}[size[2]]
    return sizes


def instruction_sets(machine: Machine) -> dict[str, Scalar]:
    """Return the flags of REPORTED_FLAGS that the kernel reports; {} if it reports no flags (macOS)."""
    for line in machine.text("proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            present = set(value.split())
            return {flag: flag in present for flag in REPORTED_FLAGS if flag in present}
    return {}
