"""The OpenCL driver: which device, its context and queue, programs built from sources/opencl_*.cl, and launches."""

import atexit
import os
import shutil
import tempfile
import threading
import warnings
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from cluster.errors import UserError, nearest
from cluster.paths import cache, private_dir
from workers.errors import KernelsFailed

SOURCES = Path(__file__).parents[1] / "sources"
FORMS = ("items", "groups")
GROUP, TILE, EACH = 256, 16, 1024
POCL = "Portable Computing Language"
LEAST_FREE_BYTES = 32 << 20
NO_BINDING = "pyopencl is not installed: pip install 'polyfleet[opencl]'"
NO_DRIVER = "no OpenCL driver is installed, such as pocl-opencl-icd for CPUs or the GPU vendor's"


def binding() -> ModuleType:
    """pyopencl. Raises KernelsFailed where PoCL, which ends the process when it cannot write the programs that it
    compiles, has no folder for them.
    """
    folder = os.environ.get("POCL_CACHE_DIR")
    if folder is None or _refused(Path(folder)):
        os.environ["POCL_CACHE_DIR"] = str(_programs_folder())
    import pyopencl

    return pyopencl


@lru_cache(1)
def _programs_folder() -> Path:
    wanted = cache() / "opencl"
    with suppress(OSError, UserError):
        private_dir(wanted)
    if not (why := _refused(wanted)):
        return wanted
    with suppress(OSError):
        other = Path(tempfile.mkdtemp(prefix="pf-opencl-"))
        atexit.register(shutil.rmtree, other, ignore_errors=True)
        if not (why := _refused(other)):
            return other
    raise KernelsFailed("opencl", f"programs cannot be kept: {why}", "make space, or name a folder in POLYFLEET_CACHE")


def _refused(folder: Path) -> str:
    """Why the programs cannot be written there, "" where they can."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            free_bytes = shutil.disk_usage(folder).free
    except OSError as e:
        return f"{folder}: {e.strerror}"
    return f"{folder} has {free_bytes} bytes free, {LEAST_FREE_BYTES} are needed" * (free_bytes < LEAST_FREE_BYTES)


def unavailable_reason() -> str:
    """Why no device can be used, "" where one can."""
    try:
        return "" if devices() else NO_DRIVER
    except ImportError:
        return NO_BINDING
    except KernelsFailed as e:
        return e.reason
    except Exception as e:  # a driver's loader may say anything
        return f"{NO_DRIVER}: {e}".splitlines()[0]


def devices() -> list[Any]:
    """GPUs first, then accelerators, CPUs last."""
    cl = binding()
    order = (cl.device_type.GPU, cl.device_type.ACCELERATOR, cl.device_type.CPU)
    try:
        found = [one for platform in cl.get_platforms() for one in platform.get_devices()]
    except cl.LogicError:  # the loader found no driver
        return []
    usable = [one for one in found if one.type & sum(order) and one.compiler_available]
    return sorted(usable, key=lambda one: next(n for n, kind in enumerate(order) if one.type & kind))


def chosen(name: str) -> Any:
    """The device whose name has these words, in any case; the first without any. Raises UserError."""
    found = devices()
    names = [one.name for one in found]
    fitting = [one for one in found if name.lower() in one.name.lower()]
    if not fitting:
        raise UserError(f"no OpenCL device is called {name!r}", nearest(name, names))
    return fitting[0]


class Driver:
    """A device with one queue, in order. Calls of several threads take turns to launch."""

    def __init__(self, device: Any, form: str):
        cl = self.cl = binding()
        self.on_cpu = bool(device.type & cl.device_type.CPU)
        if form not in ("", *FORMS):
            raise UserError(f"unknown form {form!r}", nearest(form, FORMS))
        self.device, self.form = device, form or ("items" if self.on_cpu else "groups")
        self.group = min(GROUP, 1 << (int(device.max_work_group_size).bit_length() - 1))
        self.tile = min(TILE, 1 << ((self.group.bit_length() - 1) // 2))
        self.each = EACH if self.form == "items" else 1
        self.largest_bytes = int(device.max_mem_alloc_size)
        self.context = cl.Context([device])
        self.queue = cl.CommandQueue(self.context, device)
        self._kernels: dict[tuple[str, ...], Any] = {}
        self._turn, self._process = threading.Lock(), os.getpid()

    def launch(
        self, program: str, kernel: str, dtypes: tuple[str, str], count: int, local: int, *arguments: Any
    ) -> None:
        """`count` groups of `local` work-items each; with `local` 0 `count` items, in groups of the driver's choice."""
        self.require_own_process()
        with self._turn:
            made = self._kernel(program, kernel, dtypes)
            made.set_args(*arguments)
            self.cl.enqueue_nd_range_kernel(self.queue, made, (count * max(local, 1),), (local,) if local else None)

    def require_own_process(self) -> None:
        """A fork has none of the driver's threads, and would wait for them for ever."""
        if os.getpid() != self._process:
            raise KernelsFailed(
                "opencl",
                "this process was forked from one that uses OpenCL",
                "start processes with the method 'spawn' or 'forkserver'",
            )

    def forget(self) -> None:
        self.queue.finish()
        self._kernels.clear()

    def _kernel(self, program: str, kernel: str, dtypes: tuple[str, str]) -> Any:
        key = program, *dtypes, kernel
        if key not in self._kernels:
            made = self._built(program, dtypes)
            self._kernels |= {(program, *dtypes, one.function_name): one for one in made.all_kernels()}
        return self._kernels[key]

    def _built(self, program: str, dtypes: tuple[str, str]) -> Any:
        rows, weights = dtypes
        sizes = {"GROUP": self.group, "TILE": self.tile, "EACH": self.each}
        masks = {"MASK_BOOL": 1, "MASK_F32": 2, "MASK_T": 3}
        values = [f"-D{name}={value}" for name, value in (sizes | masks).items()]
        options = ["-w", f"-DT_{rows}", f"-DW_{weights}", *values]  # -w: PoCL warns about vectors wider than the CPU's
        if self.device.platform.name == POCL and (why := _refused(Path(os.environ["POCL_CACHE_DIR"]))):
            raise KernelsFailed("opencl", f"a program cannot be kept: {why}", "make space there")
        text = "\n".join((SOURCES / f"{name}.cl").read_text() for name in self._files(program))
        made = self.cl.Program(self.context, text)
        try:
            with warnings.catch_warnings():  # pyopencl warns about any output of a successful build
                warnings.simplefilter("ignore", self.cl.CompilerWarning)
                return made.build(options, cache_dir=False)
        except self.cl.RuntimeError as e:
            raise KernelsFailed(
                "opencl",
                f"{self.device.name} does not build opencl_{program}.cl: {_first_error(str(e))}",
                "use kernels 'torch', and tell us the driver and its version",
            ) from e

    def _files(self, program: str) -> list[str]:
        if program == "gates":
            return ["opencl_values", "opencl_gates"]
        tree = ["opencl_tree"] if self.form == "groups" else []
        return ["opencl_values", *tree, f"opencl_{program}_{self.form}"]


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower() and "clbuildprogram" not in line.lower()), lines[0])[
        :300
    ]
