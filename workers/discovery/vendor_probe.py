"""One vendor's files and tools read in a child process of its own: a driver that hangs costs that vendor, nobody else.

Run as `python -m workers.discovery.vendor_probe VENDOR ROOT SYSTEM` it prints devices and findings as JSON.
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
from workers.discovery.machine import TOOL_TIMEOUT_S, Machine, tool_output
from workers.interpreter import interpreter

Found = tuple[list[Device], list[Finding]]
# More than one tool inside the child may take, so that a tool's own time-out is told rather than the child's.
CHILD_TIMEOUT_S = TOOL_TIMEOUT_S + 2


def probe(names: Iterable[str], machine: Machine, timeout_s: float = CHILD_TIMEOUT_S) -> list[Found]:
    """What each vendor's child found, in the order of `names`; all children run at once."""
    wanted = list(names)
    if not wanted:
        return []
    with ThreadPoolExecutor(len(wanted)) as pool:
        return list(pool.map(lambda name: _in_child(name, machine, timeout_s), wanted))


def _in_child(name: str, machine: Machine, timeout_s: float) -> Found:
    own, theirs = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")
    search = own if name in builtin_vendors() or not theirs else os.pathsep.join([own, theirs])
    here = {**machine.environ, "PYTHONPATH": search}
    command = [interpreter(), "-P", "-m", __name__, name, str(machine.root), machine.system]
    said, problem = tool_output(command, here, timeout_s)
    if problem:
        return [], [probe_failure(name, problem)]
    try:
        found = json.loads(said)
        devices = [Device(**d) for d in found["devices"]]
        if strangers := {d.backend for d in devices} - {name}:
            return [], [probe_failure(name, f"it reported devices of {', '.join(sorted(strangers))}")]
        return devices, [Finding(**f) for f in found["findings"]]
    except (ValueError, KeyError, TypeError) as e:
        return [], [probe_failure(name, f"its answer is not valid: {e}")]


def probe_failure(name: str, problem: str) -> Finding:
    known, tool = vendor(name), "the vendor's own tool"
    return Finding(
        "error",
        name,
        f"looking for {known.title} devices failed: {problem}",
        f"run {' or '.join(known.tools) or tool} by hand; a reboot or another driver may be needed",
    )


def vendor_file(name: str) -> Any:
    """The module with a vendor's `present` and `find`; one without any finds nothing."""
    if name in builtin_vendors():
        return import_module(f"workers.discovery.{name}")
    entry = plugins.entries(plugins.DISCOVERY).get(name)
    return entry.load() if entry else _Nothing


class _Nothing:
    @staticmethod
    def present(machine: Machine) -> bool:
        return False

    @staticmethod
    def find(machine: Machine) -> Found:
        return [], []


def probe_vendor(name: str, machine: Machine) -> Found:
    """A vendor's `find`. What it cannot read is a finding: vendors' tools print anything."""
    try:
        found: Found = vendor_file(name).find(machine)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        return [], [probe_failure(name, f"{type(e).__name__}: {e}")]
    return found


def main(name: str, root: str, system: str) -> None:
    from dataclasses import asdict

    devices, findings = probe_vendor(name, Machine(Path(root), os.environ, system))
    answer = {"devices": [asdict(d) for d in devices], "findings": [asdict(f) for f in findings]}
    os.write(1, json.dumps(answer).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
