"""Read each vendor's files and tools in its own child process, so that a hanging driver affects only its vendor.

`python -m workers.devices.discovery.vendor_probe VENDOR ROOT SYSTEM` prints devices and findings as JSON.
"""

import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from cluster.catalogue import builtin_vendors, plugins, vendor
from cluster.types import Device, Finding
from workers.devices.discovery.machine import TOOL_TIMEOUT_S, Machine, tool_output
from workers.processes.interpreter import interpreter

ProbeResult = tuple[list[Device], list[Finding]]
# Longer than the time-out of a tool in the child, so that the tool's time-out is reported, not the child's.
CHILD_TIMEOUT_S = TOOL_TIMEOUT_S + 2


def probe(names: Iterable[str], machine: Machine, timeout_s: float = CHILD_TIMEOUT_S) -> list[ProbeResult]:
    """Probe vendors in parallel child processes. Returns the results in the order of `names`."""
    vendors = list(names)
    if not vendors:
        return []
    with ThreadPoolExecutor(len(vendors)) as pool:
        return list(pool.map(lambda name: _in_child(name, machine, timeout_s), vendors))


def _in_child(name: str, machine: Machine, timeout_s: float) -> ProbeResult:
    package_root, user_path = str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")
    search = package_root if name in builtin_vendors() or not user_path else os.pathsep.join([package_root, user_path])
    environment = {**machine.environ, "PYTHONPATH": search}
    command = [interpreter(), "-P", "-m", __name__, name, str(machine.root), machine.system]
    output, problem = tool_output(command, environment, timeout_s)
    if problem:
        return [], [probe_failure(name, problem)]
    try:
        reply = json.loads(output)
        devices = [Device(**d) for d in reply["devices"]]
        if other_backends := {d.backend for d in devices} - {name}:
            return [], [probe_failure(name, f"it reported devices of {', '.join(sorted(other_backends))}")]
        return devices, [Finding(**f) for f in reply["findings"]]
    except (ValueError, KeyError, TypeError) as e:
        return [], [probe_failure(name, f"its reply is not valid: {e}")]


def probe_failure(name: str, problem: str) -> Finding:
    row, tool = vendor(name), "the vendor's own tool"
    return Finding(
        "error",
        name,
        f"looking for {row.title} devices failed: {problem}",
        f"run {' or '.join(row.tools) or tool} by hand; a reboot or another driver may be needed",
    )


def vendor_file(name: str) -> Any:
    """Return the module with a vendor's `present` and `find`, or a stand-in that finds nothing."""
    if name in builtin_vendors():
        return import_module(f"workers.devices.discovery.vendors.{name}")
    entry = plugins.entries(plugins.DISCOVERY).get(name)
    return entry.load() if entry else _Nothing


class _Nothing:
    @staticmethod
    def present(machine: Machine) -> bool:
        return False

    @staticmethod
    def find(machine: Machine) -> ProbeResult:
        return [], []


def probe_vendor(name: str, machine: Machine) -> ProbeResult:
    """Call a vendor's `find`. Its errors become a finding, because vendors' tools may print anything."""
    try:
        result: ProbeResult = vendor_file(name).find(machine)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        return [], [probe_failure(name, f"{type(e).__name__}: {e}")]
    return result


def main(name: str, root: str, system: str) -> None:
    from dataclasses import asdict

    devices, findings = probe_vendor(name, Machine(Path(root), os.environ, system))
    reply = {"devices": [asdict(d) for d in devices], "findings": [asdict(f) for f in findings]}
    os.write(1, json.dumps(reply).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
