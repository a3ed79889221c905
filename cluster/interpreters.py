"""A Python that somebody else made: what it is and has, told by itself, and whether ranks or a whole node can use it.

Ray wants one Python, to the patch, and one version of itself under all of a fleet: a node of another Python joins where
that check is off, and then its actors crash. Ranks only need torch and the few packages that our own code imports
beside it. So a pool's Python that Ray cannot run under still serves: its nodes run from ours, and start what imports
torch from the pool's.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

LEAST_PYTHON = (3, 11)
NEEDED = ("torch", "numpy", "psutil", "pydantic", "pydantic_settings", "xxhash")
"""Modules, each of a distribution of the same name, that ranks of ours import wherever they run."""
TIMEOUT_S = 20.0

# Runs under any Python 3.8 or newer: what is too old should say so. The file of torch tells what it was built for.
_ASK = """
import importlib.metadata as metadata, importlib.util as util, json, platform, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
asked = json.loads(sys.argv[1])
torch = util.find_spec("torch")
print(json.dumps({
    "python": platform.python_version(),
    "versions": {name: version(name) for name in asked["distributions"] if version(name)},
    "modules": [name for name in asked["modules"] if util.find_spec(name) is not None],
    "torch": torch.origin if torch else None,
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What `path` told of itself: its version, those distributions and modules that it has of what was asked for, and
    the file of its torch. `problem` is "" or why it told nothing.
    """

    path: str
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    torch: str = ""
    problem: str = ""

    @property
    def refusal(self) -> str:
        """Why ranks cannot run from it, "" where they can."""
        if self.problem:
            return self.problem
        if tuple(map(int, self.python.split(".")[:2])) < LEAST_PYTHON:
            return f"is Python {self.python}; Polyfleet needs {'.'.join(map(str, LEAST_PYTHON))} or newer"
        missing = [name for name in NEEDED if name not in self.modules]
        return f"has no {', '.join(missing)}" if missing else ""

    @property
    def remedy(self) -> str:
        missing = [name for name in NEEDED if name not in self.modules]
        if self.problem or len(missing) in (0, len(NEEDED)):
            return "name the `python` of an environment with torch, or use requirements"
        return f"install what it lacks: {self.path} -m pip install {' '.join(missing)}"

    @property
    def runs_ray(self) -> bool:
        """Whether a node of this fleet can run from it: the same Python and the same Ray as here."""
        return self.python == platform.python_version() and self.versions.get("ray") == version("ray")


def look(path: str | Path, distributions: Iterable[str] = (), modules: Iterable[str] = ()) -> Interpreter:
    """Ask it. Nothing is imported there: that would take seconds."""
    asked = {"distributions": ["ray", *distributions], "modules": [*NEEDED, *modules]}
    command = [str(path), "-c", _ASK, json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd="/", check=False)
        told: dict[str, Any] = json.loads(done.stdout)
        found = told["python"], told["versions"], frozenset(told["modules"]), told["torch"] or ""
    except (OSError, subprocess.TimeoutExpired) as e:
        return Interpreter(str(path), problem=f"cannot be run: {e}")
    except (ValueError, KeyError, TypeError):
        return Interpreter(str(path), problem="is no Python")
    return Interpreter(str(path), *found)


def for_nodes(pools: Path) -> Path:
    """The Python that the nodes of a pool run from: the pool's own where Ray can run under it, else ours."""
    ours = Path(sys.executable)
    return pools if pools == ours or look(pools).runs_ray else ours
