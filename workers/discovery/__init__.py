"""Which devices this node has. One file per vendor; no device is opened and torch is not imported.

A vendor's file has `present(machine)`, a quick look for a sign of its hardware, and `find(machine) -> (devices,
findings)`, which runs in a child with a time-out wherever there is a sign. The CPU's file reads the kernel's own files
only, which cannot hang, and runs here.
"""

from importlib import import_module
from pathlib import Path

from cluster.accelerators import TABLE, backend_name
from cluster.vocabulary import Device, Finding
from workers.discovery.health import health
from workers.discovery.machine import Machine
from workers.discovery.probe import look, probe
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
    signs = [name for name in wanted if name != "cpu" and _vendor(name).present(here)]
    answers = probe(signs, here) + ([look("cpu", here)] if "cpu" in wanted else [])
    devices = [d for found, _ in answers for d in found]
    findings = [f for _, said in answers for f in said]
    findings += mismatches(devices, versions(), torch_build())
    findings += health(devices, here)
    return tuple(devices), tuple(findings)


def _vendor(name: str):  # type: ignore[no-untyped-def]
    return import_module(f"workers.discovery.{name}")
