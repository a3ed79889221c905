"""Create the environments of a host's pools, on that host.

Run as `python -m cluster.hosts.environment_setup < request`. Uses the standard library only, because nothing is
installed there yet. The request is {"pools": {pool: {"recipe": a recipe} or {"interpreter": path}, with "storage": its
folder}, "ray": the fleet's version of Ray, "node": the recipe of a Python that nodes can run from}. The output is lines
of JSON: {"progress": text}, then {"done": {"node": a Python that nodes run from, "pools": {pool: {"interpreter",
"storage": its identity}}}} or {"error": {"message", "remedy", "user"}}.
"""

import json
import sys
from pathlib import Path
from typing import Any

from cluster.environments import environments, interpreters, recipes
from cluster.environments.interpreters import Interpreter
from cluster.errors import PolyfleetError, UserError
from cluster.fleet import identity
from cluster.paths import storage_dir


def send(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    try:
        send(done=_prepare(json.load(sys.stdin)))
    except PolyfleetError as e:
        send(error={"message": e.message, "remedy": e.remedy, "user": isinstance(e, UserError)})
    except OSError as e:
        send(error={"message": f"{e.filename}: {e.strerror}", "remedy": "", "user": False})


def _prepare(request: dict[str, Any]) -> dict[str, Any]:
    pools = {
        pool: (_interpreter(pool_request), _storage(pool, pool_request["storage"]))
        for pool, pool_request in request["pools"].items()
    }
    usable = [
        python
        for python, _ in pools.values()
        if can_run_nodes(interpreters.inspect_interpreter(python), request["ray"])
    ]
    node = usable[0] if usable else _make(request["node"])
    reply = {pool: {"interpreter": str(python), "storage": storage} for pool, (python, storage) in pools.items()}
    return {"node": str(node), "pools": reply}


def can_run_nodes(interpreter: Interpreter, ray: str) -> bool:
    """Return whether nodes of this fleet can run from it.

    It needs the fleet's version of Ray, and the minor version of Python that the head and this process have.
    """
    minor = f"{sys.version_info.major}.{sys.version_info.minor}."
    missing = set(interpreters.REQUIRED_MODULES) - {"torch"} - interpreter.modules
    return (
        not (interpreter.problem or missing)
        and interpreter.python.startswith(minor)
        and interpreter.versions.get("ray") == ray
    )


def _storage(pool: str, folder: str) -> str:
    """Return the identity of a pool's storage; create the folder if it is missing."""
    try:
        return identity.storage_identity(storage_dir(Path(folder)))
    except UserError as e:
        raise UserError(f"pools.{pool}.storage: {e.message}", e.remedy) from None


def _interpreter(pool: dict[str, Any]) -> Path:
    """Return the pool's Python.

    One that the pool names need not have Ray: then only its ranks run from it.
    """
    if "interpreter" in pool:
        return environments.named_interpreter(pool["interpreter"])
    return _make(pool["recipe"])


def _make(recipe: dict[str, Any]) -> Path:
    return environments.create(recipes.from_plain(recipe), lambda line: send(progress=line))


if __name__ == "__main__":
    main()
