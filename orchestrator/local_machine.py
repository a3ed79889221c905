"""What this machine has, without a fleet. What needs torch is asked of a child: the CLI imports none."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from cluster.errors import FleetError, UserError
from cluster.serialization import to_plain

Data = dict[str, Any]
TORCH_S = 120.0  # a cold disk and a loaded machine make importing torch and its extensions a matter of minutes


def backends() -> list[Data]:
    """Rows of workers.selection.summary. Raises FleetError where the child fails."""
    return _asked("workers.selection")


def local_node() -> Data:
    """This machine as the inventory tells of a node; it is in no pool, and nobody leases its devices."""
    from workers.discovery import discover
    from workers.discovery.versions import versions

    found, said = discover()
    return {
        "node": socket.gethostname(),
        "pool": "",
        "state": "ready",
        "versions": versions(),
        "devices": [{**to_plain(device), "leased_by": ""} for device in found],
        "findings": [to_plain(finding) for finding in said],
    }


def libraries() -> list[Data]:
    """Rows of workers.libraries."""
    return _asked("workers.libraries")


def kernels() -> list[Data]:
    """Rows of workers.kernels: implementations of operations, by name."""
    return _asked("workers.kernels")


def tuned(asked: Data, interpreter: str = sys.executable) -> Iterator[Data]:
    """Measurements of workers.kernels.tuner, as they are made. Raises UserError for what cannot be measured,
    FleetError where the child fails.
    """
    child = [interpreter, "-P", "-m", "workers.kernels", "tune", json.dumps(asked)]
    quiet = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(child, env=quiet, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
        except BaseException:  # whoever reads stopped
            process.terminate()
            raise
        if process.wait():
            said.seek(0)
            _refuse(process.returncode, said.read())


def findings() -> list[Data]:
    """What `doctor` tells: of hardware, drivers and limits, and of vendors' libraries that do not load here."""
    from workers.discovery import discover
    from workers.discovery.import_checks import import_failures

    _, found = discover()
    return [{"node": "", **to_plain(finding)} for finding in (*found, *import_failures())]


def _asked(module: str) -> list[Data]:
    child = [sys.executable, "-P", "-m", module, "--json"]
    quiet = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    try:
        done = subprocess.run(child, env=quiet, capture_output=True, text=True, timeout=TORCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise FleetError(f"{module} gave no answer within {TORCH_S:g} s", "see whether `import torch` hangs") from None
    if done.returncode:
        _refuse(done.returncode, done.stderr)
    rows: list[Data] = json.loads(done.stdout)
    return rows


def _refuse(code: int, stderr: str) -> None:
    """Raise what a child that failed has said last."""
    said = (stderr.strip().splitlines() or ["no message"])[-1].removeprefix("error: ")
    raise (UserError if code == UserError.exit_code else FleetError)(said)
