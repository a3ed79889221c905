"""Triton as it is in this process, and how one of its kernels is launched.

Whether kernels are compiled or interpreted is settled for a whole process when Triton is imported, by the variable
TRITON_INTERPRET: its own functions (sums, maxima) are then either the one or the other.
"""

import importlib
import json
import os
from contextlib import nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.errors import UserError
from workers.kernels.parts import triton_table as table

Version = tuple[int, int]
INTERPRET = "TRITON_INTERPRET"
SOURCES = Path(__file__).parent.parent / "sources"
REMEDY = f"set {INTERPRET}=1 before Python starts to compute on the CPU, slowly, as tests do"
OLDEST_NVIDIA = (8, 0)


@cache
def installed() -> Version | None:
    """(major, minor) of Triton, None where it is not there."""
    for name in ("triton", "triton-xpu", "pytorch-triton-rocm", "pytorch-triton-xpu"):
        try:
            found = version(name).split(".")
        except PackageNotFoundError:
            continue
        return int(found[0]), int(found[1])
    return None


def asked_to_interpret() -> bool:
    """As Triton reads the variable."""
    return os.environ.get(INTERPRET, "").lower() in ("1", "true", "on", "yes", "y")


@cache
def interpreted() -> bool:
    """Imports Triton. Raises UserError where it was imported before the variable was set, or the other way round."""
    import triton.language as tl

    compiles = hasattr(tl.sum, "device_caches") or type(tl.sum).__name__ == "JITFunction"
    if compiles == asked_to_interpret():
        was, now = ("without", "set") if compiles else ("with", "not set")
        raise UserError(
            f"this process imported Triton {was} {INTERPRET}, which is {now} since",
            "set the variable before Python starts, or not at all",
        )
    return not compiles


def unavailable_reason() -> str:
    """Why Triton's kernels cannot compute in this process, with what to do; "" when they can."""
    if (have := installed()) is None:
        return "Triton is not installed: pip install triton==3.7.1"
    if asked_to_interpret():
        if have < (3, 5):
            return (
                f"the interpreter of Triton {have[0]}.{have[1]} cannot loop beside NumPy 2.4: pip install triton==3.7.1"
            )
        return _import_failure()
    kind = _kind_here()
    if not kind:
        return f"torch sees no GPU of NVIDIA, AMD or Intel here; {REMEDY}"
    if kind == "cuda" and not torch.version.hip and (have_cc := torch.cuda.get_device_capability()) < OLDEST_NVIDIA:
        return f"the GPU has compute capability {have_cc[0]}.{have_cc[1]}; these kernels need 8.0; {REMEDY}"
    return _import_failure()


def _import_failure() -> str:
    try:
        interpreted()
    except UserError as e:
        return f"{e}: {e.remedy}"
    except (ImportError, OSError, RuntimeError) as e:
        return f"Triton does not load: {type(e).__name__}: {e}"
    return ""


def _kind_here() -> str:
    """torch's word for the GPUs it sees, "" for none."""
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if hasattr(torch, "xpu") and torch.xpu.is_available() else ""


def device_here(wanted: torch.device | None) -> torch.device:
    """With its number. Raises UserError for one that Triton does not compute on in this process."""
    kind = "cpu" if interpreted() else _kind_here()
    if wanted is None:
        wanted = torch.device(kind)
    if wanted.type != kind:
        why = "Triton is interpreted, on the CPU" if kind == "cpu" else f"they compute on {kind}"
        raise UserError(f"kernels 'triton' do not compute on {wanted}: {why}", f"name {kind}, or use kernels 'torch'")
    if kind == "cpu":
        return wanted
    module = torch.get_device_module(kind)
    index = module.current_device() if wanted.index is None else wanted.index
    if index >= module.device_count():
        raise UserError(f"there is no {wanted}", f"name one of {kind}:0 to {kind}:{module.device_count() - 1}")
    return torch.device(kind, index)


def target_of(device: torch.device) -> table.Target:
    """The target whose lines of the table hold for a device; for one that has none, the next smaller of its kind."""
    if device.type == "xpu":
        return table.TARGETS["xpu"]
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        known = arch if arch in table.TARGETS else "gfx942" if arch.startswith("gfx9") else "gfx1100"
        return table.TARGETS[known]
    major, minor = torch.cuda.get_device_capability(device)
    exact = f"sm_{major}{minor}"
    fallback = {8: "sm_86", 9: "sm_90", 10: "sm_100"}.get(major, "sm_120")
    return table.TARGETS[exact if exact in table.TARGETS else fallback]


@cache
def committed() -> dict[str, dict[str, list[int]]]:
    """{target and dtype: {configuration: [registers, spills, bytes of shared memory]}} of sources/resources.json."""
    lines: dict[str, dict[str, list[int]]] = json.loads((SOURCES / "resources.json").read_text())["lines"]
    return lines


class Launcher:
    """Launches kernels on one device. `programs`: so many run at once there, and persistent ones are started."""

    def __init__(self, device: torch.device, target: table.Target):
        self.device, self.target = device, target
        self.interpreted = device.type == "cpu"
        self.programs = 4 if self.interpreted else _processors(device)
        self._kernels: dict[table.Config, tuple[Any, dict[str, int]]] = {}
        self._allowed: set[tuple[table.Config, torch.dtype]] = set()
        self._module = None if self.interpreted else torch.get_device_module(device.type)

    def __call__(
        self, config: table.Config, dtype: torch.dtype, grid: tuple[int, ...], *given: Any, **flags: Any
    ) -> None:
        """`given` in the order of the kernel's parameters; `flags` are its compile-time ones but for the blocks."""
        kernel, options = self._kernels.get(config) or self._load(config)
        if (config, dtype) not in self._allowed:
            self._require_allowed(config, dtype)
        if self.interpreted:
            with np.errstate(all="ignore"):  # infinities and NaN are answers
                kernel[grid](*given, **flags, **options)
            return
        with self._here():
            kernel[grid](*given, **flags, **options)

    def close(self) -> None:
        """Compiled programs stay with Triton's functions, which other launchers of the process share."""
        self._kernels.clear()

    def _load(self, config: table.Config) -> tuple[Any, dict[str, int]]:
        kernel = getattr(importlib.import_module(f"workers.kernels.sources.{config.module}"), config.kernel)
        options = config.named()
        if not self.interpreted:
            options |= {"num_warps": config.warps, "num_stages": config.stages}
            if config.ctas > 1:
                options["num_ctas"] = config.ctas
        self._kernels[config] = kernel, options
        return kernel, options

    def _require_allowed(self, config: table.Config, dtype: torch.dtype) -> None:
        """Raises UserError for a configuration that is not in the committed table, or spills there."""
        if not self.interpreted and self.target.name in table.COMMITTED:
            require_committed(config, dtype, self.target)
        self._allowed.add((config, dtype))

    def _here(self) -> Any:
        """Triton launches on the device that is chosen now."""
        assert self._module is not None
        if self._module.current_device() == self.device.index:
            return nullcontext()
        return self._module.device(self.device)


SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""As lines of the committed table name them."""


def require_committed(config: table.Config, dtype: torch.dtype, on: table.Target) -> None:
    """Raises UserError where the committed table does not hold the configuration, or says that it spills."""
    line = committed().get(f"{on.name} {SHORT[dtype]}", {}).get(str(config))
    if line is None or line[1]:
        told = "has not been compiled ahead of time" if line is None else f"spills {line[1]} registers"
        raise UserError(
            f"{config} {told} for {on.name} in {SHORT[dtype]}: it is not launched",
            "`polyfleet kernels resources` compiles the table anew; kernels 'torch' compute without it",
        )


def _processors(device: torch.device) -> int:
    properties = torch.get_device_module(device.type).get_device_properties(device)
    return int(getattr(properties, "multi_processor_count", 0) or getattr(properties, "gpu_subslice_count", 0) or 64)
