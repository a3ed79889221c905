"""Send our code to a Ray node whose Python does not have it; the node keeps it in its user's cache.

Ray pickles functions and classes that are defined within a function by value, so a node can load them without importing
our packages. Ray's own mechanism (`runtime_env`) needs `ray[default]` on the node.
"""

import inspect
from collections.abc import Callable
from typing import Any

from cluster.environments import code_export
from cluster.errors import FleetError

LIMIT_S = 120.0
"""Seconds for unpacking and the first import of the libraries, from a disk that may be slow."""
REMEDY = "install polyfleet in the Python of that Ray node, or start the node with a Python that has it"


class CodeDeliveries:
    """Deliveries of our code to Ray nodes. Each runs until it has ended: a slow node may take longer than one wait, and
    a delivery that restarts each time would never end there.
    """

    def __init__(self) -> None:
        self._results: dict[str, Any] = {}

    def deliver(self, ray_id: str) -> str:
        """Send our Python packages to a node, or wait for an earlier delivery; return their folder there.

        Raises FleetError if the node needs longer than LIMIT_S, or if they cannot be imported there: the libraries that
        they need are not sent.
        """
        import ray

        result = self._results.get(ray_id) or self._results.setdefault(ray_id, _send(ray_id))
        if not ray.wait([result], timeout=LIMIT_S)[0]:
            raise FleetError(
                f"Polyfleet was sent to the node but was not unpacked within {LIMIT_S:.0f} s",
                f"wait, since unpacking continues, or {REMEDY}",
            )
        self.forget(ray_id)
        folder, error = ray.get(result)
        if error:
            raise FleetError(f"Polyfleet was sent to the node but cannot be imported there: {error}", REMEDY)
        return str(folder)

    def forget(self, ray_id: str) -> None:
        self._results.pop(ray_id, None)

    def clear(self) -> None:
        self._results.clear()


def _send(ray_id: str) -> Any:
    """Return the Ray reference of the result."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on_node = NodeAffinitySchedulingStrategy(ray_id, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_unpacker()).options(scheduling_strategy=on_node)
    return task.remote(code_export.archive())


def _unpacker() -> Callable[[bytes], tuple[str, str]]:
    def unpack(archive: bytes) -> tuple[str, str]:
        """Return (folder, ""), or ("", reason).

        Imports in a child process: Ray reuses this worker for other tasks.
        """
        import io
        import os
        import subprocess
        import sys
        import tarfile
        import tempfile

        imports = "import workers.node.agent, workers.attempt.supervision.supervisor, workers.tasks.rank_main"
        script = f"from workers.processes import process_tree\nprocess_tree.reset_priority()\n{imports}"
        script += "\nfrom cluster.environments import code_export\nprint(code_export.export())"
        with tempfile.TemporaryDirectory(prefix="polyfleet-") as folder:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                tar.extractall(folder, filter="data")
            process = subprocess.run(
                [sys.executable, "-P", "-c", script], cwd=folder, env=os.environ | {"PYTHONPATH": folder},
                stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            )  # fmt: skip
        error_lines = process.stderr.strip().splitlines() or [f"Python ended with code {process.returncode}"]
        return process.stdout.strip(), error_lines[-1] if process.returncode else ""

    return unpack


def delivered_class(agent: type, folder: str) -> type:
    """Make a class with the methods of `agent`, for a node that has our packages in `folder` only."""

    def begin(self: Any, **arguments: Any) -> None:
        import sys

        sys.path.insert(0, folder)
        from workers.node.agent import Agent

        self.agent = Agent(**arguments)

    def calls(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            return getattr(self.agent, name)(*args)

        return call

    names = [name for name, _ in inspect.getmembers(agent, inspect.isfunction) if not name.startswith("_")]
    return type(agent.__name__, (), {"__init__": begin, **{name: calls(name) for name in names}})


def is_missing_our_code(text: str) -> bool:
    """Check whether an error text says that one of our packages could not be imported."""
    return any(f"No module named '{name}" in text for name in code_export.PACKAGES)
