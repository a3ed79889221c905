"""Check whether JAX is usable in this process, choose its platform, and call compiled functions.

JAX's own choice of a platform starts all of them once and for the entire process: on a machine with GPUs it would take
most of their memory from torch. So on machines without a TPU, kernels have a client of their own for the CPU.
"""

import importlib
import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cluster.errors import UserError, nearest
from workers.errors import KernelsFailed, KernelsUnavailable

PLATFORMS = ("tpu", "cpu")
OLDEST = (0, 6)
INSTALL = "pip install 'polyfleet[pallas]'"
EXACT = {"xla_allow_excess_precision": False}
"""XLA would else elide the conversion to a shorter dtype and back that a norm's rounding is."""
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Tests compile hundreds of interpreted kernels for small arrays: without these, each takes three times as long."""


@cache
def unavailable_reason() -> str:
    """Return why JAX cannot compute in this process, with the remedy, or "". Starts no platform."""
    try:
        parts = version("jax").split(".")
    except PackageNotFoundError:
        return f"jax is not installed: {INSTALL}"
    if (int(parts[0]), int(parts[1])) < OLDEST:
        return f"jax {'.'.join(parts)} is older than {'.'.join(map(str, OLDEST))}: {INSTALL}"
    try:
        import jax.experimental.pallas.tpu  # noqa: F401
        import jaxlib.xla_client
    except (ImportError, OSError, RuntimeError, AttributeError) as e:
        return f"jax does not load: {type(e).__name__}: {e}"
    return "" if hasattr(jaxlib.xla_client, "make_cpu_client") else f"jaxlib {version('jaxlib')} makes no CPU client"


def has_tpu() -> bool:
    """Return whether this machine has libtpu and a device file of a TPU without starting JAX."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return False
    files = [file for pattern in ("accel[0-9]*", "vfio/[0-9]*") for file in Path("/dev").glob(pattern)]
    return bool(files) and find_spec("libtpu") is not None


def find_device(platform: str) -> Any:
    """Return the JAX device of a platform ("": a TPU if there is one, else the CPU).

    Raises UserError for another platform, KernelsUnavailable if JAX cannot use a TPU here.
    """
    if platform not in ("", *PLATFORMS):
        raise UserError(f"unknown platform {platform!r}", nearest(platform, PLATFORMS))
    if platform == "cpu" or not (platform or has_tpu()):
        return _cpu_device(os.getpid())
    import jax

    try:
        return jax.local_devices(backend="tpu")[0]
    except RuntimeError as e:
        reason = f"JAX cannot use a TPU: {e}".splitlines()[0][:300]
        raise KernelsUnavailable("pallas", reason, "name platform 'cpu' for the interpreter") from e


@cache
def _cpu_device(process: int) -> Any:
    """Make a client of this process's own: one inherited by a fork has no threads."""
    from jaxlib import xla_client

    client: Any = xla_client.make_cpu_client(asynchronous=False)
    return client.local_devices()[0]


@cache
def _interpreter_options(device: Any) -> dict[str, Any]:
    """Return XLA's options for the interpreter: those that this jaxlib has of the ones that make compilation short."""
    import jax

    for options in (EXACT | QUICK, EXACT):
        with suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda x: x + 1, compiler_options=options)(jax.device_put(0, device))
            return options
    return {}


class Driver:
    """JAX functions on one device. Functions are sources/pallas_*.py: arrays are positional, constants by name."""

    def __init__(self, device: Any):
        self.device = device
        self.interpreted = device.platform != "tpu"
        self._process = os.getpid()
        self._functions: dict[str, Callable[..., Any]] = {}

    def put(self, array: Any) -> Any:
        """Copy a NumPy array to the device."""
        import jax

        self.check_process()
        return jax.device_put(array, self.device)

    def run(self, module: str, name: str, *arrays: Any, **constants: Any) -> Any:
        """Call a function of sources/pallas_<module>.py. It is compiled once per shapes, dtypes and constants."""
        import jax

        self.check_process()
        key = f"{module}.{name}"
        if key not in self._functions:
            self._functions[key] = self._compiled(module, name)
        with jax.default_device(self.device):  # else a call whose result needs no array starts JAX's platforms
            return self._functions[key](*arrays, **constants)

    def _compiled(self, module: str, name: str) -> Callable[..., Any]:
        import jax

        function = getattr(importlib.import_module(f"workers.kernels.sources.pallas_{module}"), name)
        parameters = inspect.signature(function).parameters.values()
        names = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        options = _interpreter_options(self.device) if self.interpreted else None
        compiled: Callable[..., Any] = jax.jit(function, static_argnames=names, compiler_options=options)
        return compiled

    def release(self) -> None:
        """Forget compiled programs."""
        for function in self._functions.values():
            function.clear_cache()  # type: ignore[attr-defined]
        self._functions.clear()

    def check_process(self) -> None:
        """Raise KernelsFailed in a fork: JAX's threads exist only in the process that started them."""
        if os.getpid() != self._process:
            raise KernelsFailed(
                "pallas",
                "this process was forked from one that uses JAX",
                "start processes with the method 'spawn' or 'forkserver'",
            )
