"""OpenCL driver: choose a device, build programs from sources/opencl_*.cl, and launch kernels."""

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
from workers.kernels.device import find_device_named, why_no_device

SOURCES = Path(__file__).parents[1] / "sources"
FORMS = ("items", "groups")
GROUP, TILE, EACH = 256, 16, 1024
POCL = "Portable Computing Language"
MIN_FREE_BYTES = 32 << 20
NO_BINDING = "pyopencl is not installed: pip install 'polyfleet[opencl]'"
NO_DRIVER = "no OpenCL driver is installed, such as pocl-opencl-icd for CPUs or the GPU vendor's"


def import_pyopencl() -> ModuleType:
    """Import pyopencl. Raises KernelsFailed if PoCL has no folder for compiled programs: without one it would end the
    process.
    """
    folder = os.environ.get("POCL_CACHE_DIR")
    if folder is None or _unwritable_reason(Path(folder)):
        os.environ["POCL_CACHE_DIR"] = str(_programs_folder())
    import pyopencl

    return pyopencl


@lru_cache(1)
def _programs_folder() -> Path:
    folder = cache() / "opencl"
    with suppress(OSError, UserError):
        private_dir(folder)
    if not (why := _unwritable_reason(folder)):
        return folder
    with suppress(OSError):
        other = Path(tempfile.mkdtemp(prefix="pf-opencl-"))
        atexit.register(shutil.rmtree, other, ignore_errors=True)
        if not (why := _unwritable_reason(other)):
            return other
    raise KernelsFailed(
        "opencl",
        f"compiled programs cannot be stored: {why}",
        "free disk space, or set POLYFLEET_CACHE to another folder",
    )


def _unwritable_reason(folder: Path) -> str:
    """Return why programs cannot be written to `folder`, or ""."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            free_bytes = shutil.disk_usage(folder).free
    except OSError as e:
        return f"{folder}: {e.strerror}"
    return f"{folder} has {free_bytes} bytes free; {MIN_FREE_BYTES} are needed" * (free_bytes < MIN_FREE_BYTES)


def unavailable_reason() -> str:
    """Return why no OpenCL device can be used, or ""."""
    return why_no_device(devices, NO_DRIVER, NO_BINDING)


def devices() -> list[Any]:
    """Return the usable devices: GPUs first, then accelerators, then CPUs."""
    cl = import_pyopencl()
    order = (cl.device_type.GPU, cl.device_type.ACCELERATOR, cl.device_type.CPU)
    try:
        all_devices = [one for platform in cl.get_platforms() for one in platform.get_devices()]
    except cl.LogicError:  # no driver is installed
        return []
    usable = [one for one in all_devices if one.type & sum(order) and one.compiler_available]
    return sorted(usable, key=lambda one: next(n for n, kind in enumerate(order) if one.type & kind))


def find_device(name: str) -> Any:
    """Return the first device whose name contains `name`, in any case. Raises UserError if there is none."""
    return find_device_named("OpenCL device", name, devices(), lambda one: str(one.name))


class Driver:
    """A device with one in-order queue. Launches from several threads are serialised."""

    def __init__(self, device: Any, form: str):
        cl = self.cl = import_pyopencl()
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
        self._lock, self._process = threading.Lock(), os.getpid()

    def launch(
        self, program: str, kernel: str, dtypes: tuple[str, str], count: int, local: int, *arguments: Any
    ) -> None:
        """Launch `count` groups of `local` work-items; if `local` is 0, `count` items in any groups."""
        self.check_process()
        with self._lock:
            compiled = self._kernel(program, kernel, dtypes)
            compiled.set_args(*arguments)
            self.cl.enqueue_nd_range_kernel(self.queue, compiled, (count * max(local, 1),), (local,) if local else None)

    def check_process(self) -> None:
        """Raise KernelsFailed in a forked process: it lacks the driver's threads and would wait for them forever."""
        if os.getpid() != self._process:
            raise KernelsFailed(
                "opencl",
                "this process was forked from one that uses OpenCL",
                "start processes with the method 'spawn' or 'forkserver'",
            )

    def release_kernels(self) -> None:
        self.queue.finish()
        self._kernels.clear()

    def _kernel(self, program: str, kernel: str, dtypes: tuple[str, str]) -> Any:
        key = program, *dtypes, kernel
        if key not in self._kernels:
            built = self._build(program, dtypes)
            self._kernels |= {(program, *dtypes, one.function_name): one for one in built.all_kernels()}
        return self._kernels[key]

    def _build(self, program: str, dtypes: tuple[str, str]) -> Any:
        rows, weights = dtypes
        sizes = {"GROUP": self.group, "TILE": self.tile, "EACH": self.each}
        masks = {"MASK_BOOL": 1, "MASK_F32": 2, "MASK_T": 3}
        values = [f"-D{name}={value}" for name, value in (sizes | masks).items()]
        options = ["-w", f"-DT_{rows}", f"-DW_{weights}", *values]  # -w: PoCL warns about vectors wider than the CPU's
        if self.device.platform.name == POCL and (why := _unwritable_reason(Path(os.environ["POCL_CACHE_DIR"]))):
            raise KernelsFailed("opencl", f"a compiled program cannot be stored: {why}", "free disk space there")
        text = "\n".join((SOURCES / f"{name}.cl").read_text() for name in self._files(program))
        unbuilt = self.cl.Program(self.context, text)
        try:
            with warnings.catch_warnings():  # pyopencl warns about any output of a successful build
                warnings.simplefilter("ignore", self.cl.CompilerWarning)
                return unbuilt.build(options, cache_dir=False)
        except self.cl.RuntimeError as e:
            raise KernelsFailed(
                "opencl",
                f"{self.device.name} does not build opencl_{program}.cl: {_first_error(str(e))}",
                "use kernels 'torch', and open an issue with the driver and its version",
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
