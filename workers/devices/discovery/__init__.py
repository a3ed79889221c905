"""Discover the devices of this node, one file per vendor, without opening a device or importing torch.

A vendor's file in `vendors/` has `present(machine)`, a quick check for its hardware, and
`find(machine) -> (devices, findings)`, which then runs in a child process with a time-out. The CPU's file runs in this
process: it reads only files of the kernel, which cannot hang.
"""

from collections import Counter
from pathlib import Path

from cluster import catalogue
from cluster.catalogue import backend_name, builtin_vendors, plugins
from cluster.types import Device, Finding
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.machine_findings import health
from workers.devices.discovery.vendor_probe import probe, probe_failure, probe_vendor, vendor_file
from workers.devices.discovery.versions import mismatches, torch_build, versions
from workers.processes import interpreter

VENDORS = Path(__file__).parent / "vendors"
NAMES = tuple(name for name in builtin_vendors() if (VENDORS / f"{name}.py").exists())


def discover(
    backend: str | None = None, machine: Machine | None = None
) -> tuple[tuple[Device, ...], tuple[Finding, ...]]:
    """Return the devices of one backend, or of all, and findings for `doctor`. A vendor's failure is a finding.

    Raises UserError for an unknown backend.
    """
    local = machine or Machine()
    interpreter_findings = interpreter.findings()
    vendors_to_probe = names() if backend is None else (backend_name(backend),)
    signs = {name: _sign(name, local) for name in vendors_to_probe if name != "cpu"}
    results = probe([name for name, sign in signs.items() if sign is True], local)
    results += [probe_vendor("cpu", local)] if "cpu" in vendors_to_probe else []
    devices = [d for probed, _ in results for d in probed]
    findings = [sign for sign in signs.values() if isinstance(sign, Finding)]
    findings += [f for _, reported in results for f in reported]
    findings += interpreter_findings
    findings += mismatches(devices, versions(), torch_build())
    findings += health(devices, local)
    return tuple(devices), tuple(findings)


def names() -> tuple[str, ...]:
    """Names of vendors: built-in ones, then those of installed distributions; the CPU last."""
    # `catalogue.vendors`: importing the folder `vendors` sets that name here, whatever was imported as it.
    plugin_names = [
        name for name in plugins.entries(plugins.DISCOVERY) if name in catalogue.vendors() and name not in NAMES
    ]
    return (*(name for name in NAMES if name != "cpu"), *plugin_names, "cpu")


def _sign(name: str, machine: Machine) -> bool | Finding:
    """Return whether the vendor's hardware seems present; a finding if the check fails."""
    try:
        return bool(vendor_file(name).present(machine))
    except Exception as e:
        return probe_failure(name, f"{type(e).__name__}: {e}")


def accelerators() -> dict[str, int]:
    """Count this machine's usable devices per backend, without the CPU. Opens no device."""
    devices, _ = discover()
    return dict(Counter(d.backend for d in devices if d.backend != "cpu" and not (d.emulated or d.unavailable_reason)))
