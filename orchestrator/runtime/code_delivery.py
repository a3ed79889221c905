"""Our code on a node of Ray whose Python has not got it: sent there once, and kept in the cache of its user.

Ray pickles by value what is made within a function, so such a function or class can be loaded where nothing of ours can
be imported. Ray's own way (`runtime_env`) needs `ray[default]` there.
"""

import inspect
from collections.abc import Callable
from typing import Any

from cluster import code_export
from cluster.errors import FleetError

LIMIT_S = 120.0
"""Its libraries are imported there once, from a disk that may be slow."""
REMEDY = "install polyfleet in the Python of that Ray node, or start the node with a Python that has it"


def bring(ray_id: str) -> str:
    """The folder there that has our packages. Raises FleetError where they cannot be used: what they import is not
    sent with them.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(ray_id, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_unpacker()).options(scheduling_strategy=there)
    unpacked = task.remote(code_export.archive())
    try:
        folder, why = ray.get(unpacked, timeout=LIMIT_S)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(unpacked, force=True)  # the next try would run beside it
        raise FleetError(f"Polyfleet was sent there and is not unpacked after {LIMIT_S:.0f} s", REMEDY) from None
    if why:
        raise FleetError(f"Polyfleet was sent there and cannot be imported: {why}", REMEDY)
    return str(folder)


def _unpacker() -> Callable[[bytes], tuple[str, str]]:
    def unpack(archive: bytes) -> tuple[str, str]:
        """The folder, or why it cannot be used. In a process of its own: this one may serve others' tasks later."""
        import io
        import os
        import subprocess
        import sys
        import tarfile
        import tempfile

        needs = "import workers.agent, workers.attempt.supervisor, workers.attempt.rank_main"
        script = f"{needs}\nfrom cluster import code_export\nprint(code_export.export())"
        with tempfile.TemporaryDirectory(prefix="polyfleet-") as whole:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                tar.extractall(whole, filter="data")
            ran = subprocess.run(
                [sys.executable, "-P", "-c", script], cwd=whole, env=os.environ | {"PYTHONPATH": whole},
                stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            )  # fmt: skip
        said = ran.stderr.strip().splitlines() or [f"Python ended with code {ran.returncode}"]
        return ran.stdout.strip(), said[-1] if ran.returncode else ""

    return unpack


def carried(agent: type, folder: str) -> type:
    """A class that does as `agent` where our packages are in `folder` and nowhere else."""

    def begin(self: Any, **given: Any) -> None:
        import sys

        sys.path.insert(0, folder)
        from workers.agent import Agent

        self.agent = Agent(**given)

    def calls(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            return getattr(self.agent, name)(*args)

        return call

    names = [name for name, _ in inspect.getmembers(agent, inspect.isfunction) if not name.startswith("_")]
    return type(agent.__name__, (), {"__init__": begin, **{name: calls(name) for name in names}})


def lacks_us(text: str) -> bool:
    """Whether an error says that one of our packages could not be imported."""
    return any(f"No module named '{name}" in text for name in code_export.PACKAGES)
