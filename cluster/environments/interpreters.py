"""Inspect a Python interpreter that a user provides: whether ranks, or a Ray node, can run from it.

All nodes of a fleet need one Python, to the patch release, and one version of Ray: with that check off, a node of
another Python joins, and then its actors crash. Ranks only need torch and the few packages that our own code imports
beside it. So a pool's Python that cannot run Ray is still usable: the pool's nodes run from our Python, and start the
processes that import torch from the pool's.
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

MIN_PYTHON = (3, 11)
REQUIRED_MODULES = ("torch", "numpy", "psutil", "pydantic", "pydantic_settings", "xxhash")
"""Modules that ranks import wherever they run. Each belongs to a distribution of the same name."""
TIMEOUT_S = 20.0

# Runs under any Python from 3.8 on, so that one that is too old can print its version. The path of torch's file is
# enough to see what torch was built for.
_PROBE = """
import importlib.metadata as metadata, importlib.util as util, json, platform, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
request = json.loads(sys.argv[1])
torch = util.find_spec("torch")
print(json.dumps({
    "python": platform.python_version(),
    "versions": {name: version(name) for name in request["distributions"] if version(name)},
    "modules": [name for name in request["modules"] if util.find_spec(name) is not None],
    "torch": torch.origin if torch else None,
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Facts that the interpreter at `path` reported.

    `versions` and `modules` list which of the requested distributions and modules it has; `torch` is the path of its
    torch. `problem` is why it reported nothing, else "".
    """

    path: str
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    torch: str = ""
    problem: str = ""

    @property
    def unusable_reason(self) -> str:
        """Why ranks cannot run from it; "" if they can."""
        if self.problem:
            return self.problem
        if tuple(map(int, self.python.split(".")[:2])) < MIN_PYTHON:
            return f"is Python {self.python}; Polyfleet needs {'.'.join(map(str, MIN_PYTHON))} or newer"
        missing = [name for name in REQUIRED_MODULES if name not in self.modules]
        return f"has no {', '.join(missing)}" if missing else ""

    @property
    def remedy(self) -> str:
        missing = [name for name in REQUIRED_MODULES if name not in self.modules]
        if self.problem or len(missing) in (0, len(REQUIRED_MODULES)):
            return "name the `python` of an environment with torch, or use requirements"
        return f"install them: {self.path} -m pip install {' '.join(missing)}"

    @property
    def runs_ray(self) -> bool:
        """Whether a node of this fleet can run from it: it has the Python and the Ray of this process."""
        return self.python == platform.python_version() and self.versions.get("ray") == version("ray")


def inspect_interpreter(
    path: str | Path, distributions: Iterable[str] = (), modules: Iterable[str] = ()
) -> Interpreter:
    """Run the interpreter and return its facts. It imports none of the modules, which would take seconds."""
    request = {"distributions": ["ray", *distributions], "modules": [*REQUIRED_MODULES, *modules]}
    command = [str(path), "-c", _PROBE, json.dumps(request)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd="/", check=False)
        reply: dict[str, Any] = json.loads(process.stdout)
        facts = reply["python"], reply["versions"], frozenset(reply["modules"]), reply["torch"] or ""
    except (OSError, subprocess.TimeoutExpired) as e:
        return Interpreter(str(path), problem=f"cannot be run: {e}")
    except (ValueError, KeyError, TypeError):
        return Interpreter(str(path), problem="is not a Python interpreter")
    return Interpreter(str(path), *facts)


def node_interpreter(pool_python: Path) -> Path:
    """Return the Python that the nodes of a pool run from: the pool's own if it can run Ray, else ours."""
    our_python = Path(sys.executable)
    return pool_python if pool_python == our_python or inspect_interpreter(pool_python).runs_ray else our_python
