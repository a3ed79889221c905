"""Check that installed vendor libraries can be imported, each in a child process, because one may hang or crash."""

import os
from concurrent.futures import ThreadPoolExecutor

from cluster.types import Finding
from workers.devices.discovery.machine import tool_output
from workers.processes.interpreter import MODULES, has, interpreter

TIMEOUT_S = 120.0


def import_failures(names: tuple[str, ...] = MODULES) -> list[Finding]:
    """Return a finding with the error message for each installed library that does not load."""
    installed = [name for name in names if has(name)]
    with ThreadPoolExecutor(max(1, len(installed))) as pool:
        return [finding for finding in pool.map(_try, installed) if finding]


def _try(name: str) -> Finding | None:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    _, problem = tool_output([interpreter(), "-c", f"import {name}"], environment, TIMEOUT_S)
    if not problem:
        return None
    message = problem.partition(": ")[2] or problem
    return Finding("error", name, f"it is installed but does not load: {message}", "install the release for this torch")
