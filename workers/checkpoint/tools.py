"""What can be done with checkpoints by name, for processes that do not want torch: each is done in a child.

    python -m workers.checkpoint      reads {"verb", "arguments"} from stdin, writes one JSON object per line:
                                      {"progress": [done_bytes, total_bytes]} …, at last {"result"} or {"error"}

An agent runs it in its pool's environment, the command line in its own. A reader that goes away ends it.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import cluster.errors
import workers
import workers.errors
from cluster.errors import FleetError, PolyfleetError, UserError, nearest
from cluster.places import TOOLS, is_uri

VERBS = {
    "list": "inspect:list_checkpoints",
    "show": "inspect:describe",
    "verify": "transfer.copying:verify_at",
    "plan": "planning:plan",
    "diff": "diffing:diff",
    "convert": "converting:convert",
    "prune": "pruning:prune",
    "pin": "pruning:pin_one",
    "discard": "pruning:discard",
    "copy": "transfer.copying:copy",
    "import": "exchange.importing:import_here",
    "export": "exchange.exporting:export_checkpoint",
}
LONG = ("verify", "diff", "convert", "copy", "import", "export")
"""These tell their progress."""
EVERY_S = 0.1
CODE = str(Path(workers.__file__).parents[1])
TOKENS = ("TOKEN", "SECRET", "PASSWORD")
Progress = Callable[[int, int], None]


def run(verb: str, arguments: dict[str, Any], progress: Progress | None = None) -> Any:
    """Do it in this process. Raises UserError for an unknown verb, and whatever the verb raises."""
    if verb not in VERBS:
        raise UserError(f"no tool {verb!r}", nearest(verb, tuple(VERBS)))
    for name, use in TOOLS.get(verb, {}).items():
        if is_uri(str(arguments.get(name))) and not use.stores:
            raise UserError(f"`{verb}` reads and writes folders: {arguments[name]!r} is none", "copy it here first")
    where, _, name = VERBS[verb].partition(":")
    function = getattr(import_module(f"workers.checkpoint.{where}"), name)
    return function(**arguments, **({"progress": progress} if verb in LONG else {}))


def run_in_child(
    verb: str, arguments: dict[str, Any], progress: Progress | None = None, python: str = sys.executable
) -> Any:
    """The same in a process of its own. An error in `progress` ends it; so does the end of this process."""
    request = json.dumps({"verb": verb, "arguments": arguments})
    child = subprocess.Popen(
        [python, "-m", "workers.checkpoint"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    complaints: list[str] = []
    listener = threading.Thread(target=lambda: complaints.extend(child.stderr or ()), daemon=True)
    listener.start()
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(request + "\n")  # and left open: its end tells the child that we are gone
        child.stdin.flush()
        return _answer(child.stdout, progress)
    except _NoAnswerError:
        child.wait()
        listener.join(1)
        last = complaints[-1].strip() if complaints else f"exit code {child.returncode}"
        raise FleetError(
            f"the process for `{verb}` ended without an answer: {last}", "try again; see memory and disk"
        ) from None
    finally:
        child.kill()
        child.wait()
        listener.join(1)
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                stream.close()


class _NoAnswerError(Exception):
    pass


def _answer(lines: Iterator[str], progress: Progress | None) -> Any:
    for line in lines:
        told = json.loads(line)
        if "result" in told:
            return told["result"]
        if "error" in told:
            raise error_from(told["error"])
        if progress is not None:
            progress(*told["progress"])
    raise _NoAnswerError


def error_from(told: dict[str, Any]) -> PolyfleetError:
    """The error that another process told. Its class is one of ours; any other becomes a FleetError."""
    from workers.checkpoint.format.manifest import DamagedCheckpoint

    kinds = {**vars(cluster.errors), **vars(workers.errors), "DamagedCheckpoint": DamagedCheckpoint}
    kind = kinds.get(str(told["kind"]), FleetError)
    try:
        error: PolyfleetError = kind(*told["arguments"])
    except TypeError:
        error = FleetError(told["message"])
    return error


def _environment() -> dict[str, str]:
    """Ours without tokens of the fleet: no tool needs them. Credentials of object stores stay: a copy does."""
    ours = {k: v for k, v in os.environ.items() if not (k.startswith(("POLYFLEET_", "RAY_")) and k.endswith(TOKENS))}
    path = ours.get("PYTHONPATH", "")
    return ours | {"PYTHONPATH": f"{CODE}{os.pathsep}{path}" if path else CODE}
