"""Steps on one host over SSH: inspect it, send our code, create environments, join and leave.

The commands are short and mean the same in any login shell. They run our own code, with requests and replies in JSON.
"""

import base64
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster.environments import recipes
from cluster.errors import FleetError, PolyfleetError, UserError
from cluster.host import copy_rate
from cluster.hosts import host_python, plan
from cluster.hosts.ssh import Remote

FOLDER = Path(__file__).parent
LOOK_S, SEND_S, PREPARE_S, JOIN_S, LEAVE_S = 30.0, 300.0, 3600.0, 180.0, 60.0
Progress = Callable[[str], None]
Data = dict[str, Any]


def inspect_host(remote: Remote, request: Data) -> plan.HostFacts:
    """Collect the facts of a host.

    Raises HostUnreachable, HostRefused, and PythonMissing if it has no usable Python.
    """
    code = f"REQUEST = {request!r}\n".encode() + (FOLDER / "host_facts.py").read_bytes()
    requested_s = time.time()
    completed = remote.run(["sh", "-c", host_python.FIND], code, timeout_s=LOOK_S)
    answered_s = time.time()
    lines = completed.output.decode(errors="replace").strip().splitlines()
    host_python.check_present(remote, lines[-1] if lines else "")
    try:
        return plan.parse_facts(json.loads(lines[-1]), requested_s, answered_s)
    except (ValueError, IndexError, TypeError, KeyError):
        raise _unexpected_reply(remote, completed.stderr or completed.output.decode(errors="replace")) from None


def send_code(remote: Remote, facts: plan.HostFacts, code: Path) -> str:
    """Copy our code to the host's cache and return its folder. Does nothing if the code is there already."""
    target = f"{facts.cache}/code/{code.name}"
    if facts.has_code:
        return target
    script = base64.b64encode((FOLDER / "code_receiver.py").read_bytes()).decode()
    command = [facts.python, "-I", "-c", f"import base64; exec(base64.b64decode('{script}'))", target]
    completed = remote.run(command, _packed(code), timeout_s=SEND_S)
    if completed.code:
        raise FleetError(
            f"host {remote.host} could not store our code: {_last_line(completed.stderr)}", "free disk space there"
        )
    return target


def _packed(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=3) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.add(path, str(path.relative_to(folder)))
    return packed.getvalue()


def prepare(
    remote: Remote, facts: plan.HostFacts, code: str, pools: Mapping[str, tuple[Any, str]], progress: Progress
) -> Data:
    """Create the environments of `pools` on the host.

    `pools` has, by pool, a recipe or the path of an interpreter, and the folder of the storage. Returns the reply of
    `cluster.hosts.environment_setup`: each pool's interpreter and storage identity, and a Python for nodes.
    """
    pool_requests = {
        pool: ({"interpreter": source} if isinstance(source, str) else {"recipe": asdict(source)})
        | {"storage": storage or f"{facts.home}/storage/{pool}"}
        for pool, (source, storage) in pools.items()
    }
    request = {"pools": pool_requests, "ray": version("ray"), "node": asdict(recipes.node_recipe())}
    command = ["env", f"PYTHONPATH={code}", facts.python, "-P", "-m", "cluster.hosts.environment_setup"]
    reply: Data = call(remote, command, request, PREPARE_S, progress)
    return reply


def join(remote: Remote, python: str, code: str, home: str, request: Data, progress: Progress) -> Data:
    """Start the host's nodes that are not running; returns the host's state."""
    reply: Data = call(remote, _host_command(python, code, home, "join"), request, JOIN_S, progress)
    return reply


def start_head(remote: Remote, python: str, code: str, home: str, request: Data, progress: Progress) -> tuple[str, str]:
    """Start the fleet's head on the host; returns its address, and the identity of its Ray cluster."""
    reply: Data = call(remote, _host_command(python, code, home, "lead"), request, JOIN_S, progress)
    return str(reply["address"]), str(reply["cluster"])


def leave(remote: Remote, python: str, code: str, home: str) -> list[str]:
    """Stop all of the fleet's processes on the host. Returns the nodes that ran."""
    stopped: list[str] = call(remote, _host_command(python, code, home, "leave"), {}, LEAVE_S, lambda line: None)
    return stopped


def _host_command(python: str, code: str, home: str, verb: str) -> list[str]:
    rate = os.environ.get(copy_rate.SETTING)
    variables = [f"PYTHONPATH={code}", f"POLYFLEET_HOME={home}", *([f"{copy_rate.SETTING}={rate}"] if rate else [])]
    return ["env", *variables, python, "-P", "-m", "workers.node.host", verb]


def call(remote: Remote, command: Sequence[str], request: Data, timeout_s: float, progress: Progress) -> Any:
    """Run one of our programs on the host and return its result; pass on its progress as it comes.

    Raises the error that the program returns.
    """
    reply: Data = {}

    def on_line(line: str) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return  # output of the login shell
        if isinstance(message, dict):
            reply.update(message)
            if "progress" in message:
                progress(f"{remote.host}: {message['progress']}")

    completed = remote.run(command, json.dumps(request).encode(), timeout_s=timeout_s, on_line=on_line)
    if error := reply.get("error"):
        kind: type[PolyfleetError] = UserError if error["user"] else FleetError
        raise kind(f"host {remote.host}: {error['message']}", error["remedy"])
    if "done" not in reply:
        raise _unexpected_reply(remote, completed.stderr)
    return reply["done"]


def _unexpected_reply(remote: Remote, output: str) -> FleetError:
    return FleetError(
        f"host {remote.host} sent an unexpected reply: {_last_line(output)}",
        f"check that `ssh {remote.host} true` runs there and prints nothing",
    )


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
