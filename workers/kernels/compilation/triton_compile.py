"""Compile kernels ahead of time, without a device, and read the resources that a program needs. A separate process:

    python -m workers.kernels.compilation.triton_compile

reads jobs as lines of JSON and writes one line for each. TRITON_INTERPRET must not be set in it.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from workers.kernels.compilation import triton_table as table

IN_FLOAT32 = {"lse", "delta", "partial"}
INTEGERS = {"R", "C", "N", "D", "P", "K", "M", "T", "S", "H", "share", "position", "stride_b", "stride_h", "stride_t"}
FLOATS = {"eps", "offset", "scale"}
MULTIPLES_OF_16 = {"C", "N", "D", "P", "K", "M", "T", "S", "stride_b", "stride_h", "stride_t"}
"""Sizes that are marked as multiples of 16, if they are: Triton then moves 16 bytes per lane."""
ALL_FLAGS = {"HAS_WEIGHT": True, "HAS_BIAS": True, "HAS_LSE": True, "ROUNDED": True, "REST": True, "IN_FLOAT32": False}
"""Compile-time flags with which a program needs most registers."""

WITH_TILES = {table.PRODUCTS, table.ATTENTION}
"""Modules whose variants differ in more than addresses."""

Flags = dict[str, Any]


def variants(config: table.Config, dtype: str, on: table.CompileTarget) -> list[tuple[bool, Flags]]:
    """List (whether sizes are multiples of 16, flags) of the different programs of one configuration, the one that
    needs most resources first.
    """
    if config.kernel == "matmul":
        transposes = [{"A_TRANSPOSED": a, "B_TRANSPOSED": b} for a in (False, True) for b in (False, True)]
        odd = config.blocks[0] < 128
        return [*([(False, transposes[0])] if odd else []), *((True, one) for one in transposes)]
    if config.kernel == "attention_delta":
        return [(True, {"E": config.blocks[-1]})]
    if config.module == table.ATTENTION:
        return _attention_variants(config, dtype, on)
    if config.kernel == "rope":
        return [(False, {"PAIRS": True}), (True, {"PAIRS": True}), (True, {"PAIRS": False})]
    if config.module in (table.NORMS, table.BACKWARD) and config.kernel.endswith("_rows"):
        direction = "backward" if config.module == table.BACKWARD else "forward"
        return [(True, {})] if config.blocks[1] > table.MAX_UNALIGNED_COLUMNS[direction] else [(False, {}), (True, {})]
    return [(False, {}), (True, {})]


def _attention_variants(config: table.Config, dtype: str, on: table.CompileTarget) -> list[tuple[bool, Flags]]:
    """Variants of attention: a configuration may serve plain calls, calls with masks and odd heads, or both."""
    width, itemsize, result = config.blocks[-1], 4 if dtype == "fp32" else 2, []
    plain, padded, odd = ({"D": width - less, "E": width - less, "CAUSAL": True} for less in (0, 8, 6))
    if table.attention(config.kernel, width, width, itemsize, on, masked=True) == config:
        result += [(False, odd | {"MASK": 1}), (True, plain | {"MASK": 2})]
    if table.attention(config.kernel, width, width, itemsize, on) == config:
        result += [(True, plain | {"MASK": 0}), (True, padded | {"MASK": 0})]
    return result


def compile_variant(config: table.Config, dtype: str, on: table.CompileTarget, aligned: bool, flags: Flags) -> Any:
    import triton
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"workers.kernels.sources.{config.module}"), config.kernel)
    values = ALL_FLAGS | flags | config.named()
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(kernel.params):
        name = parameter.name
        signature[name] = _type(name, parameter.is_constexpr, dtype, flags)
        if signature[name] == "constexpr":
            constants[(number,)] = 1 if name == "stride_s" else values[name]
        elif signature[name].startswith("*") or (aligned and name in MULTIPLES_OF_16):
            attributes[(number,)] = [["tt.divisibility", 16]]
    options = {"num_warps": config.warps, "num_stages": config.stages}
    if config.ctas > 1:
        options["num_ctas"] = config.ctas
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=_gpu(on), options=options)


def _type(name: str, is_constexpr: bool, dtype: str, flags: Flags) -> str:
    """Type of a parameter, as the launcher would specialise it: a stride of 1 is a constant."""
    if is_constexpr or name == "stride_s":
        return "constexpr"
    if name in INTEGERS:
        return "i32"
    if name in FLOATS:
        return "fp32"
    if name == "mask":
        return {1: "*u8", 2: "*fp32"}.get(flags.get("MASK", 0), f"*{dtype}")
    return "*fp32" if name in IN_FLOAT32 else f"*{dtype}"


def _gpu(on: table.CompileTarget) -> Any:
    from triton.backends.compiler import GPUTarget

    if on.vendor == "nvidia":
        return GPUTarget("cuda", int(on.name.removeprefix("sm_")), on.lanes)
    return GPUTarget("hip", on.name, on.lanes)


def read_resources(made: Any) -> tuple[int, int, int]:
    """Return (registers per thread, spilled registers, bytes of shared memory per program)."""
    if "cubin" in made.asm:
        return (*_cubin_resources(made.asm["cubin"]), made.metadata.shared)
    text = made.asm["amdgcn"]
    registers, spills = (int(re.findall(rf"\.vgpr_{what}:\s*(\d+)", text)[-1]) for what in ("count", "spill_count"))
    return registers, spills, made.metadata.shared


@cache
def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _cubin_resources(cubin: bytes) -> tuple[int, int]:
    """Read registers with cuobjdump, and count spills: loads and stores of local memory, otherwise unused here."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run_tool(_tools() / "cuobjdump", "-res-usage", file.name)
        registers, stack = (int(re.findall(rf"{what}:(\d+)", usage)[-1]) for what in ("REG", "STACK"))
        code = _run_tool(_tools() / "nvdisasm", "-c", file.name) if stack else ""
    return registers, max(len(re.findall(r"\b(?:LDL|STL)\b", code)), 1 if stack else 0)


def _run_tool(*command: Any) -> str:
    return subprocess.run([str(argument) for argument in command], capture_output=True, text=True, check=True).stdout


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Compile a job's variants. Return the maximum resources, or the compiler's error.

    If the first variant, which needs most, leaves half of the registers free, the others are not compiled.
    """
    config = table.Config(job["kernel"], tuple(job["blocks"]), job["warps"], job["stages"], job["ctas"])
    on = table.target(job["target"])
    measurements: list[tuple[int, int, int]] = []
    try:
        for aligned, flags in variants(config, job["dtype"], on):
            measurements.append(read_resources(compile_variant(config, job["dtype"], on, aligned, flags)))
            if measurements[0][0] <= table.registers(config, on) // 2 and config.module not in WITH_TILES:
                break
    except Exception as e:  # a compiler may raise anything, and the next job must still run
        return {"error": f"{type(e).__name__}: {e}".splitlines()[0][:300]}
    return {name: max(one[i] for one in measurements) for i, name in enumerate(("registers", "spills", "shared_bytes"))}


def main() -> None:
    import os

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers write to stdout, which must contain only our lines
    for line in sys.stdin:
        replies.write(json.dumps(run_job(json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
