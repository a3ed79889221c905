"""Which devices this node has. One file per vendor; no device is opened and torch is not imported.

A vendor's file has `find(machine) -> (devices, findings)`. Vendor tools run in a child with a time-out: some hang.
"""

from importlib import import_module
from pathlib import Path

from cluster.accelerators import TABLE, backend_name
from cluster.vocabulary import Device, Finding
from workers.discovery.machine import Machine
from workers.discovery.versions import mismatches, torch_build, versions

NAMES = tuple(name for name in TABLE if (Path(__file__).parent / f"{name}.py").exists())


def discover(
    backend: str | None = None, machine: Machine | None = None
) -> tuple[tuple[Device, ...], tuple[Finding, ...]]:
    """Devices of one backend, or of all, and what `doctor` should say. A vendor that cannot be read is a finding.

    Raises UserError for an unknown backend.
    """
    here = machine or Machine()
    wanted = NAMES if backend is None else (backend_name(backend),)
    devices: list[Device] = []
    findings: list[Finding] = []
    for name in wanted:
        found, said = _ask(name, here)
        devices += found
        findings += said
    findings += mismatches(devices, versions(), torch_build())
    return tuple(devices), tuple(findings)


def _ask(name: str, machine: Machine) -> tuple[list[Device], list[Finding]]:
    if name not in NAMES:
        return [], [Finding("warning", name, f"Polyfleet cannot look for {TABLE[name].title} devices yet")]
    find = import_module(f"workers.discovery.{name}").find
    try:
        found: tuple[list[Device], list[Finding]] = find(machine)
    except (OSError, ValueError, KeyError) as e:
        return [], [
            Finding("error", name, f"looking for {TABLE[name].title} devices failed: {e!r}", "please report this")
        ]
    return found
