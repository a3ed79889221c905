"""What is done on one host over SSH: looking at it, sending our code, making environments, joining, leaving.

Commands are short and the same in any login shell; what they run is code of ours, and requests and answers are JSON.
"""

import base64
import io
import json
import shlex
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster import recipes
from cluster.errors import FleetError, PolyfleetError, UserError
from cluster.hosts import plan
from cluster.hosts.ssh import HostRefused, Remote

OURS = Path(__file__).parent
LOOK_S, SEND_S, PREPARE_S, JOIN_S, LEAVE_S = 30.0, 300.0, 3600.0, 180.0, 60.0
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
NO_PYTHON = "no-python"
Progress = Callable[[str], None]
Data = dict[str, Any]

# Names and places of a Python of the head's minor version: Ray refuses any other, and actors crash where it does not.
_PLACES = (
    f"python{VERSION} /usr/bin/python{VERSION} /usr/local/bin/python{VERSION} /opt/python{VERSION}/bin/python{VERSION} "
    f'"$HOME"/.local/bin/python{VERSION} "$HOME"/.local/share/uv/python/cpython-{VERSION}*/bin/python{VERSION} '
    f'"$HOME"/.pyenv/versions/{VERSION}*/bin/python{VERSION} python3'
)
_CHECK = f"import sys; sys.exit(sys.version_info[:2] != ({VERSION.replace('.', ', ')}))"
FIND_PYTHON = (
    f"for p in {_PLACES}; do "
    f'"$p" -I -c {shlex.quote(_CHECK)} </dev/null >/dev/null 2>&1 && exec "$p" -I -; '
    f'done; echo {NO_PYTHON} "$(python3 -V 2>&1)"'
)


def look(remote: Remote, asked: Data) -> plan.Found:
    """Raises HostUnreachable and HostRefused, the latter also where it has no Python that can be used."""
    code = f"ASKED = {asked!r}\n".encode() + (OURS / "host_facts.py").read_bytes()
    asked_s = time.time()
    answer = remote.run(["sh", "-c", FIND_PYTHON], code, timeout_s=LOOK_S)
    answered_s = time.time()
    lines = answer.output.decode(errors="replace").strip().splitlines()
    if lines and lines[-1].startswith(NO_PYTHON):
        has = lines[-1].removeprefix(NO_PYTHON).strip()
        seen = f" (it has {has})" if has.startswith("Python ") else ""
        raise HostRefused(
            f"host {remote.host} has no Python {VERSION}{seen}",
            f"install it there: all nodes of one fleet have one Python; for example `uv python install {VERSION}`",
        )
    try:
        return plan.from_look(json.loads(lines[-1]), asked_s, answered_s)
    except (ValueError, IndexError, TypeError, KeyError):
        raise _misunderstood(remote, answer.said or answer.output.decode(errors="replace")) from None


def send_code(remote: Remote, found: plan.Found, code: Path) -> str:
    """Put our code where the host keeps it; returns that folder. Quick when it is there."""
    target = f"{found.cache}/code/{code.name}"
    if found.has_code:
        return target
    script = base64.b64encode((OURS / "code_receiver.py").read_bytes()).decode()
    words = [found.python, "-I", "-c", f"import base64; exec(base64.b64decode('{script}'))", target]
    answer = remote.run(words, _packed(code), timeout_s=SEND_S)
    if answer.code:
        raise FleetError(f"host {remote.host} could not take our code: {_last(answer.said)}", "free some disk there")
    return target


def _packed(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=3) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.add(path, str(path.relative_to(folder)))
    return packed.getvalue()


def prepare(
    remote: Remote, found: plan.Found, code: str, pools: Mapping[str, tuple[Any, str]], progress: Progress
) -> Data:
    """Make the environments of `pools` (a recipe or the path of an interpreter, and the storage's folder). As
    `cluster.hosts.environment_setup` tells: the interpreter of each and the identity of its storage, and one for nodes.
    """
    asked = {
        pool: ({"interpreter": wanted} if isinstance(wanted, str) else {"recipe": asdict(wanted)})
        | {"storage": storage or f"{found.home}/storage/{pool}"}
        for pool, (wanted, storage) in pools.items()
    }
    request = {"pools": asked, "ray": version("ray"), "node": asdict(recipes.of_nodes())}
    words = ["env", f"PYTHONPATH={code}", found.python, "-P", "-m", "cluster.hosts.environment_setup"]
    made: Data = ask(remote, words, request, PREPARE_S, progress)
    return made


def join(remote: Remote, python: str, code: str, home: str, request: Data, progress: Progress) -> Data:
    """Have the host's nodes started, where they do not run; the state of the host."""
    answer: Data = ask(remote, _ours(python, code, home, "join"), request, JOIN_S, progress)
    return answer


def lead(remote: Remote, python: str, code: str, home: str, request: Data, progress: Progress) -> tuple[str, str]:
    """Have the fleet's head run on the host; its address, and what tells its cluster from the one before."""
    answer: Data = ask(remote, _ours(python, code, home, "lead"), request, JOIN_S, progress)
    return str(answer["address"]), str(answer["cluster"])


def leave(remote: Remote, python: str, code: str, home: str) -> list[str]:
    """Have all that is ours on the host stopped. Returns the nodes that ran."""
    stopped: list[str] = ask(remote, _ours(python, code, home, "leave"), {}, LEAVE_S, lambda line: None)
    return stopped


def _ours(python: str, code: str, home: str, verb: str) -> list[str]:
    return ["env", f"PYTHONPATH={code}", f"POLYFLEET_HOME={home}", python, "-P", "-m", "workers.host", verb]


def ask(remote: Remote, words: Sequence[str], request: Data, timeout_s: float, progress: Progress) -> Any:
    """The answer of one of our own programs there; its lines of progress as they come. Raises what it told as error."""
    told: Data = {}

    def hear(line: str) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            return  # what a login shell prints
        if isinstance(said, dict):
            told.update(said)
            if "progress" in said:
                progress(f"{remote.host}: {said['progress']}")

    answer = remote.run(words, json.dumps(request).encode(), timeout_s=timeout_s, hear=hear)
    if error := told.get("error"):
        kind: type[PolyfleetError] = UserError if error["user"] else FleetError
        raise kind(f"host {remote.host}: {error['message']}", error["remedy"])
    if "done" not in told:
        raise _misunderstood(remote, answer.said)
    return told["done"]


def _misunderstood(remote: Remote, said: str) -> FleetError:
    return FleetError(
        f"host {remote.host} gave no answer that we understand: {_last(said)}", "see that `ssh` runs commands there"
    )


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
