"""Makes the environments of a host's pools there, from our code and the Python that was found: `python -m
cluster.hosts.environment_setup < request`. It uses the standard library only, because nothing is installed yet.

The request is {"pools": {pool: {"recipe": a recipe} or {"interpreter": path}, with "storage": its folder}, "ray": the
fleet's version of Ray, "node": the recipe of a Python that nodes can run from}. Lines of JSON come out: {"progress":
text}, then {"done": {"node": a Python that nodes run from, "pools": {pool: {"interpreter", "storage": its identity}}}}
or {"error": {"message", "remedy", "user"}}.
"""

import json
import sys
from pathlib import Path
from typing import Any

from cluster import environments, identity, interpreters, recipes
from cluster.errors import PolyfleetError, UserError
from cluster.interpreters import Interpreter
from cluster.paths import storage_dir


def tell(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    try:
        tell(done=_prepared(json.load(sys.stdin)))
    except PolyfleetError as e:
        tell(error={"message": e.message, "remedy": e.remedy, "user": isinstance(e, UserError)})
    except OSError as e:
        tell(error={"message": f"{e.filename}: {e.strerror}", "remedy": "", "user": False})


def _prepared(asked: dict[str, Any]) -> dict[str, Any]:
    pools = {pool: (_interpreter(one), _storage(pool, one["storage"])) for pool, one in asked["pools"].items()}
    able = [python for python, _ in pools.values() if runs_nodes(interpreters.look(python), asked["ray"])]
    node = able[0] if able else _made(asked["node"])
    told = {pool: {"interpreter": str(python), "storage": storage} for pool, (python, storage) in pools.items()}
    return {"node": str(node), "pools": told}


def runs_nodes(found: Interpreter, ray: str) -> bool:
    """Whether Ray runs under it in this fleet: its own version, and the minor Python of the head, which is ours too."""
    minor = f"{sys.version_info.major}.{sys.version_info.minor}."
    lacks = set(interpreters.NEEDED) - {"torch"} - found.modules
    return not (found.problem or lacks) and found.python.startswith(minor) and found.versions.get("ray") == ray


def _storage(pool: str, folder: str) -> str:
    """Its identity, also where the folder has to be made."""
    try:
        return identity.storage_identity(storage_dir(Path(folder)))
    except UserError as e:
        raise UserError(f"pools.{pool}.storage: {e.message}", e.remedy) from None


def _interpreter(asked: dict[str, Any]) -> Path:
    """One that a pool names need not have Ray: only its ranks run from it then."""
    if "interpreter" in asked:
        return environments.named_interpreter(asked["interpreter"])
    return _made(asked["recipe"])


def _made(recipe: dict[str, Any]) -> Path:
    return environments.create(recipes.from_plain(recipe), lambda line: tell(progress=line))


if __name__ == "__main__":
    main()
