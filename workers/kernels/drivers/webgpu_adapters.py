"""WebGPU adapters: import the binding, list what computes here, choose one by its name."""

import os
from functools import cache
from types import ModuleType
from typing import Any

from workers.errors import KernelsFailed
from workers.kernels.device import find_device_named, why_no_device

NO_BINDING = "wgpu is not installed: pip install 'polyfleet[webgpu]'"
NO_ADAPTER = "no WebGPU adapter is available; on Linux install a Vulkan driver, such as mesa-vulkan-drivers for CPUs"
ORDER = ("DiscreteGPU", "IntegratedGPU", "Unknown", "CPU")


@cache
def _process_of_instance() -> int:
    return os.getpid()


def check_process() -> None:
    """Raise KernelsFailed in a forked process: it lacks the driver's threads and would wait for them forever."""
    if os.getpid() != _process_of_instance():
        raise KernelsFailed(
            "webgpu",
            "this process was forked from one that uses WebGPU",
            "start processes with the method 'spawn' or 'forkserver'",
        )


@cache
def import_wgpu() -> ModuleType:
    """Import wgpu, with the platform's own interface only: OpenGL adapters lack what kernels need."""
    _process_of_instance()
    import wgpu as binding
    from wgpu.backends.wgpu_native import extras

    # Mesa's layer that selects a device would connect to a display server, and print an error if there is none.
    quiet = "NODEVICE_SELECT" not in os.environ and "MESA_VK_DEVICE_SELECT" not in os.environ
    if quiet:
        os.environ["NODEVICE_SELECT"] = "1"
    try:
        extras.set_instance_extras(backends=["Primary"])
    except RuntimeError:  # another library in this process has made the instance
        pass
    finally:
        if quiet:
            del os.environ["NODEVICE_SELECT"]
    module: ModuleType = binding
    return module


def unavailable_reason() -> str:
    """Return why no WebGPU adapter can be used, or ""."""
    return why_no_device(adapters, NO_ADAPTER, NO_BINDING)


def adapters() -> list[Any]:
    """Return the usable adapters: discrete GPUs first, then integrated ones, then CPUs."""
    wgpu = import_wgpu()
    check_process()
    usable = [one for one in wgpu.gpu.enumerate_adapters_sync() if not one.info["backend_type"].startswith("OpenGL")]
    return sorted(usable, key=lambda one: ORDER.index(one.info["adapter_type"]))


def find_adapter(name: str) -> Any:
    """Return the first adapter whose name contains `name`, in any case. Raises UserError if there is none."""
    return find_device_named("WebGPU adapter", name, adapters(), lambda one: str(one.info["device"]))
