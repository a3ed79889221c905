"""Which devices this node has. One file per vendor; no device is opened and torch is not imported.

A vendor's file has `present(machine)`, a quick look for a sign of its hardware, and `find(machine) -> (devices,
findings)`, which runs in a child with a time-out wherever there is a sign. The CPU's file reads the kernel's own files
only, which cannot hang, and runs here.
"""

from collections import Counter
from pathlib import Path

from cluster.catalogue import backend_name, builtin_vendors, plugins, vendors
from cluster.types import Device, Finding
from workers import interpreter
from workers.discovery.machine import Machine
from workers.discovery.machine_findings import health
from workers.discovery.vendor_probe import probe, probe_failure, probe_vendor, vendor_file
from workers.discovery.versions import mismatches, torch_build, versions

NAMES = tuple(name for name in builtin_vendors() if (Path(__file__).parent / f"{name}.py").exists())


def discover(
    backend: str | None = None, machine: Machine | None = None
) -> tuple[tuple[Device, ...], tuple[Finding, ...]]:
    """Devices of one backend, or of all, and what `doctor` should say. A vendor that cannot be read is a finding.

    Raises UserError for an unknown backend.
    """
    here = machine or Machine()
    unfit = interpreter.findings()
    wanted = names() if backend is None else (backend_name(backend),)
    signs = {name: _sign(name, here) for name in wanted if name != "cpu"}
    answers = probe([name for name, sign in signs.items() if sign is True], here)
    answers += [probe_vendor("cpu", here)] if "cpu" in wanted else []
    devices = [d for found, _ in answers for d in found]
    findings = [sign for sign in signs.values() if isinstance(sign, Finding)]
    findings += [f for _, said in answers for f in said]
    findings += unfit
    findings += mismatches(devices, versions(), torch_build())
    findings += health(devices, here)
    return tuple(devices), tuple(findings)


def names() -> tuple[str, ...]:
    """Of our vendors, then of those that installed distributions can look for; the CPU last."""
    theirs = [name for name in plugins.entries(plugins.DISCOVERY) if name in vendors() and name not in NAMES]
    return (*(name for name in NAMES if name != "cpu"), *theirs, "cpu")


def _sign(name: str, machine: Machine) -> bool | Finding:
    """Is there a sign of its hardware? One that cannot be looked for costs its own vendor only."""
    try:
        return bool(vendor_file(name).present(machine))
    except Exception as e:
        return probe_failure(name, f"{type(e).__name__}: {e}")


def accelerators() -> dict[str, int]:
    """How many usable devices of each back end but the CPU this machine has; found without opening any."""
    devices, _ = discover()
    return dict(Counter(d.backend for d in devices if d.backend != "cpu" and not (d.emulated or d.unavailable_reason)))
