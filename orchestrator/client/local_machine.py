"""Inspect this machine without a fleet. What needs torch runs in a child process: the CLI does not import it."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from cluster.errors import FleetError, UserError
from cluster.serialization import to_plain

if TYPE_CHECKING:
    from orchestrator.views.fleet import DeviceView, NodeView

Data = dict[str, Any]
TORCH_S = 120.0  # with a cold disk or a loaded machine, importing torch and its extensions can take minutes


def backends() -> list[Data]:
    """Rows of workers.devices.selection.summary. Raises FleetError if the child process fails."""
    return _run_module("workers.devices.selection")


def local_node() -> "NodeView":
    """This machine in the form of a node of the inventory: in no pool, and without jobs on its devices."""
    from workers.devices.discovery import discover
    from workers.devices.discovery.versions import versions

    devices, findings = discover()
    return {
        "node": socket.gethostname(),
        "state": "ready",
        "reason": "",
        "closed": "",
        "note": "",
        "pool": "",
        "devices": [cast("DeviceView", {**to_plain(device), "allocated_to": None}) for device in devices],
        "ray_node_id": "",
        "host": socket.gethostname(),
        "address": "",
        "backend": "",
        "environment": "",
        "protocol": None,
        "versions": versions(),
        "cpu_count": os.cpu_count(),
        "memory_total_bytes": None,
        "memory_free_bytes": None,
        "load_1min": None,
        "disk_free_bytes": None,
        "agent_pid": None,
        "agent_created": "",
        "storage": "",
        "storage_id": "",
        "object_store": "",
        "pending_uploads": 0,
        "neighbours": [],
        "findings": [to_plain(finding) for finding in findings],
        "notice": None,
        "use": [],
        "data": [],
    }


def libraries() -> list[Data]:
    """Rows of workers.devices.libraries."""
    return _run_module("workers.devices.libraries")


def kernels() -> list[Data]:
    """Rows of workers.kernels.dispatch: implementations of operations, by name."""
    return _run_module("workers.kernels.dispatch")


def tune(request: Data, interpreter: str = sys.executable) -> Iterator[Data]:
    """Yield measurements of workers.kernels.dispatch.tuner as they are made. Raises UserError for an invalid request,
    FleetError if the child process fails.
    """
    child = [interpreter, "-P", "-m", "workers.kernels.dispatch", "tune", json.dumps(request)]
    quiet = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(child, env=quiet, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
        except BaseException:  # the caller stopped reading
            process.terminate()
            raise
        if process.wait():
            stderr.seek(0)
            _raise_failure(process.returncode, stderr.read())


def findings() -> list[Data]:
    """Findings for `doctor`: of hardware, drivers and limits, and vendors' libraries that do not load here."""
    from workers.devices.discovery import discover
    from workers.devices.discovery.machine_findings import import_failures

    _, findings = discover()
    return [{"node": "", **to_plain(finding)} for finding in (*findings, *import_failures())]


def _run_module(module: str) -> list[Data]:
    child = [sys.executable, "-P", "-m", module, "--json"]
    quiet = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    try:
        done = subprocess.run(child, env=quiet, capture_output=True, text=True, timeout=TORCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise FleetError(
            f"{module} did not finish within {TORCH_S:g} s", "check whether `import torch` hangs"
        ) from None
    if done.returncode:
        _raise_failure(done.returncode, done.stderr)
    rows: list[Data] = json.loads(done.stdout)
    return rows


def _raise_failure(code: int, stderr: str) -> None:
    """Raise an error with the last line that a failed child process wrote."""
    message = (stderr.strip().splitlines() or ["no message"])[-1].removeprefix("error: ")
    raise (UserError if code == UserError.exit_code else FleetError)(message)
