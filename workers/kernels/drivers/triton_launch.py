"""Check whether Triton is usable in this process, and launch its kernels.

The variable TRITON_INTERPRET determines, when Triton is imported, whether kernels are compiled or interpreted. This
applies to the entire process, because Triton's own functions (sums, maxima) are then one or the other.
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
from workers.kernels.compilation import triton_table as table

Version = tuple[int, int]
INTERPRET = "TRITON_INTERPRET"
SOURCES = Path(__file__).parent.parent / "sources"
REMEDY = f"set {INTERPRET}=1 before Python starts to compute on the CPU, slowly, as tests do"
OLDEST_NVIDIA = (8, 0)


@cache
def installed() -> Version | None:
    """Return Triton's version as (major, minor), or None if it is not installed."""
    for name in ("triton", "triton-xpu", "pytorch-triton-rocm", "pytorch-triton-xpu"):
        try:
            parts = version(name).split(".")
        except PackageNotFoundError:
            continue
        return int(parts[0]), int(parts[1])
    return None


def interpreter_requested() -> bool:
    """Return whether the variable requests the interpreter, by Triton's own rules."""
    return os.environ.get(INTERPRET, "").lower() in ("1", "true", "on", "yes", "y")


@cache
def interpreted() -> bool:
    """Import Triton and return whether it interprets. Raises UserError if the variable changed after the import."""
    import triton.language as tl

    compiles = hasattr(tl.sum, "device_caches") or type(tl.sum).__name__ == "JITFunction"
    if compiles == interpreter_requested():
        was, now = ("without", "set") if compiles else ("with", "not set")
        raise UserError(
            f"this process imported Triton {was} {INTERPRET}, which is {now} now",
            "set the variable before Python starts, or not at all",
        )
    return not compiles


def unavailable_reason() -> str:
    """Return why Triton's kernels cannot compute in this process, with the remedy, or ""."""
    if (have := installed()) is None:
        return "Triton is not installed: pip install triton==3.7.1"
    if interpreter_requested():
        if have < (3, 5):
            return (
                f"the interpreter of Triton {have[0]}.{have[1]} cannot loop with NumPy 2.4: pip install triton==3.7.1"
            )
        return _import_failure()
    kind = _gpu_type()
    if not kind:
        return f"torch finds no GPU of NVIDIA, AMD or Intel here; {REMEDY}"
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


def _gpu_type() -> str:
    """Return torch's device type of the GPUs in this process, "" if there are none."""
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if hasattr(torch, "xpu") and torch.xpu.is_available() else ""


def resolve_device(device: torch.device | None) -> torch.device:
    """Return the device with its index. Raises UserError if Triton does not compute on it in this process."""
    kind = "cpu" if interpreted() else _gpu_type()
    if device is None:
        device = torch.device(kind)
    if device.type != kind:
        why = "Triton is interpreted, on the CPU" if kind == "cpu" else f"they compute on {kind}"
        raise UserError(f"kernels 'triton' do not compute on {device}: {why}", f"name {kind}, or use kernels 'torch'")
    if kind == "cpu":
        return device
    module = torch.get_device_module(kind)
    index = module.current_device() if device.index is None else device.index
    if index >= module.device_count():
        raise UserError(f"there is no {device}", f"name one of {kind}:0 to {kind}:{module.device_count() - 1}")
    return torch.device(kind, index)


def target_of(device: torch.device) -> table.CompileTarget:
    """Return the target whose lines of the table apply to a device: its own, else the next smaller of its kind."""
    if device.type == "xpu":
        return table.TARGETS["xpu"]
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        name = arch if arch in table.TARGETS else "gfx942" if arch.startswith("gfx9") else "gfx1100"
        return table.TARGETS[name]
    major, minor = torch.cuda.get_device_capability(device)
    exact = f"sm_{major}{minor}"
    fallback = {8: "sm_86", 9: "sm_90", 10: "sm_100"}.get(major, "sm_120")
    return table.TARGETS[exact if exact in table.TARGETS else fallback]


@cache
def committed(release: Version) -> dict[str, dict[str, list[int]]]:
    """Read sources/resources.json: {target and dtype: {configuration: [registers, spills, bytes of shared memory]}}.

    The lines are those of this version of Triton.
    """
    data = json.loads((SOURCES / "resources.json").read_text())
    own_lines = data["older"]["lines"] if release < table.OWN_LINES_BEFORE else {}
    lines: dict[str, dict[str, list[int]]] = data["lines"] | own_lines
    return lines


class KernelLauncher:
    """Launch kernels on one device. `programs`: the number that run at once, and of persistent programs per launch."""

    def __init__(self, device: torch.device, target: table.CompileTarget):
        self.device, self.target = device, target
        self.interpreted = device.type == "cpu"
        self.programs = 4 if self.interpreted else _processors(device)
        self._kernels: dict[table.Config, tuple[Any, dict[str, int]]] = {}
        self._allowed: set[tuple[table.Config, torch.dtype]] = set()
        self._module = None if self.interpreted else torch.get_device_module(device.type)

    def __call__(
        self, config: table.Config, dtype: torch.dtype, grid: tuple[int, ...], *arguments: Any, **flags: Any
    ) -> None:
        """Launch a kernel with `arguments` in the order of its parameters; `flags` are compile-time, except blocks."""
        kernel, options = self._kernels.get(config) or self._load(config)
        if (config, dtype) not in self._allowed:
            self._check_allowed(config, dtype)
        if self.interpreted:
            with np.errstate(all="ignore"):  # infinities and NaN are valid results
                kernel[grid](*arguments, **flags, **options)
            return
        with self._device_context():
            kernel[grid](*arguments, **flags, **options)

    def close(self) -> None:
        """Forget the kernels. Triton keeps compiled programs, which other launchers of the process share."""
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

    def _check_allowed(self, config: table.Config, dtype: torch.dtype) -> None:
        """Raise UserError for a configuration that is not in the committed table, or spills there."""
        if not self.interpreted and self.target.name in table.COMMITTED:
            check_committed(config, dtype, self.target)
        self._allowed.add((config, dtype))

    def _device_context(self) -> Any:
        """Make this device current, because Triton launches on the current device."""
        assert self._module is not None
        if self._module.current_device() == self.device.index:
            return nullcontext()
        return self._module.device(self.device)


DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Names of dtypes in the committed table."""


def check_committed(
    config: table.Config, dtype: torch.dtype, on: table.CompileTarget, release: Version | None = None
) -> None:
    """Raise UserError if the committed table of this version of Triton does not contain the configuration, or it needs
    more than the target has.
    """
    release = release or installed() or table.OWN_LINES_BEFORE
    line = committed(release).get(f"{on.name} {DTYPE_NAMES[dtype]}", {}).get(str(config))
    if line is None:
        problem = "has not been compiled ahead of time"
    else:
        problem = on.refusal_reason(*line) if line[0] else "does not compile"
    if problem:
        raise UserError(
            f"{config} {problem} for {on.name} in {DTYPE_NAMES[dtype]} with Triton {release[0]}.{release[1]}: "
            "it is not launched",
            "use kernels 'torch', or run `python -m workers.kernels.compilation.resources` to compile the table",
        )


def _processors(device: torch.device) -> int:
    properties = torch.get_device_module(device.type).get_device_properties(device)
    return int(getattr(properties, "multi_processor_count", 0) or getattr(properties, "gpu_subslice_count", 0) or 64)
