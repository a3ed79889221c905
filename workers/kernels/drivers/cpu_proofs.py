"""Check that options of the `cpu` kernels take effect: vector instructions, and several threads."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import torch

from workers.devices.libraries.library import EffectCheck
from workers.kernels.drivers.cpu_library import Compiled, compiled

PACKED = re.compile(r"\b(?:v?(?:add|sub|mul|div|fn?m(?:add|sub)\d*)ps\s|f(?:add|sub|mul|div|mla|mls)\s+v\d+\.[24]s)")
"""Arithmetic on several float32 at once: SSE, AVX and AVX-512 of x86, NEON of ARM."""
VECTOR_REGISTERS = (("zmm", 16), ("ymm", 8), ("xmm", 4))
VALUES = 1 << 20
DISASSEMBLY_LIMIT_S = 60.0
MAX_CALLS = 200
"""Maximum calls until a second thread takes part: on a busy machine it may wake up late."""


def simd(expected: bool) -> EffectCheck:
    """Check the loaded library for vector instructions, else compare its speed with a build without vectors."""
    library = compiled(expected)
    disassembly = _disassemble(library.path)
    is_vectorized, evidence = _check_instructions(library, disassembly) if disassembly else _check_speed(library)
    return EffectCheck("cpu kernels: use_simd", expected, is_vectorized == expected, evidence)


def parallel(expected: bool, library: Compiled, threads: int) -> EffectCheck:
    """Check how many threads took part in a call, which the library counts itself."""
    x = torch.ones(VALUES)
    out = torch.empty_like(x)
    active_threads = 0
    for _ in range(MAX_CALLS if expected and threads > 1 else 1):
        library.silu(0, x.data_ptr(), out.data_ptr(), VALUES, threads)
        active_threads = max(active_threads, library.threads_of_last_call())
        if active_threads > 1:
            break
    evidence = f"{active_threads} of {threads} threads computed a call"
    return EffectCheck("cpu kernels: use_parallel", expected, (active_threads > 1) == expected, evidence)


def _disassemble(path: Path) -> str:
    """Disassemble a library. Return "" without objdump, or if the file was temporary and is already deleted."""
    if not shutil.which("objdump") or not path.is_file():
        return ""
    command = ["objdump", "-d", "--no-show-raw-insn", str(path)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DISASSEMBLY_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if result.returncode else result.stdout


def _check_instructions(library: Compiled, disassembly: str) -> tuple[bool, str]:
    lines = [line for line in disassembly.splitlines() if PACKED.search(line)]
    by_width = {name: sum(f"%{name}" in line for line in lines) for name, _ in VECTOR_REGISTERS}
    counts = ", ".join(f"{count} on {name}" for name, count in by_width.items() if count) or "in NEON's registers"
    if not lines:
        return False, f"no packed float32 arithmetic in {library.path.name}"
    return library.lanes() > 1, f"{len(lines)} packed float32 instructions in {library.path.name}: {counts}"


def _check_speed(library: Compiled) -> tuple[bool, str]:
    plain = compiled(False)
    vector_s, plain_s = (_best_s(one) for one in (library, plain))
    return (
        vector_s * 1.5 < plain_s,
        f"silu of {VALUES} values takes {vector_s * 1e3:.2f} ms, without vectors {plain_s * 1e3:.2f} ms",
    )


def _best_s(library: Compiled) -> float:
    x = torch.ones(VALUES)
    out, times_s = torch.empty_like(x), []
    for _ in range(5):
        started = time.perf_counter()
        library.silu(0, x.data_ptr(), out.data_ptr(), VALUES, 1)
        times_s.append(time.perf_counter() - started)
    return min(times_s)
