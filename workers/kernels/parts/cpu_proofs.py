"""Proofs of the options of the `cpu` kernels: that vector instructions, and several threads, really compute."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import torch

from workers.kernels.parts.cpu_library import Compiled, compiled
from workers.libraries.library import EffectCheck

PACKED = re.compile(r"\b(?:v?(?:add|sub|mul|div|fn?m(?:add|sub)\d*)ps\s|f(?:add|sub|mul|div|mla|mls)\s+v\d+\.[24]s)")
"""Arithmetic on several float32 at once: SSE, AVX and AVX-512 of x86, NEON of ARM."""
WIDEST = (("zmm", 16), ("ymm", 8), ("xmm", 4))
VALUES = 1 << 20
DISASSEMBLY_LIMIT_S = 60.0
TRIES = 200
"""Calls until a second thread has computed: on a machine whose cores are all busy one wakes late."""


def simd(wanted: bool) -> EffectCheck:
    """By the instructions of the library that is loaded, else by how much faster it is than one without vectors."""
    library = compiled(wanted)
    found = _disassembled(library.path)
    seen, evidence = _counted(library, found) if found else _timed(library)
    return EffectCheck("cpu kernels: use_simd", wanted, seen == wanted, evidence)


def parallel(wanted: bool, library: Compiled, threads: int) -> EffectCheck:
    """By the threads that took part in a call, which the library counts itself."""
    x = torch.ones(VALUES)
    out = torch.empty_like(x)
    took_part = 0
    for _ in range(TRIES if wanted and threads > 1 else 1):
        library.silu(0, x.data_ptr(), out.data_ptr(), VALUES, threads)
        took_part = max(took_part, library.threads_of_last_call())
        if took_part > 1:
            break
    evidence = f"{took_part} of {threads} threads computed a call"
    return EffectCheck("cpu kernels: use_parallel", wanted, (took_part > 1) == wanted, evidence)


def _disassembled(path: Path) -> str:
    """Nothing where there is no tool for it, or no file: one that could not be kept is deleted once it is loaded."""
    if not shutil.which("objdump") or not path.is_file():
        return ""
    command = ["objdump", "-d", "--no-show-raw-insn", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DISASSEMBLY_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def _counted(library: Compiled, disassembly: str) -> tuple[bool, str]:
    lines = [line for line in disassembly.splitlines() if PACKED.search(line)]
    by_width = {name: sum(f"%{name}" in line for line in lines) for name, _ in WIDEST}
    told = ", ".join(f"{count} on {name}" for name, count in by_width.items() if count) or "in NEON's registers"
    if not lines:
        return False, f"no packed float32 arithmetic in {library.path.name}"
    return library.lanes() > 1, f"{len(lines)} packed float32 instructions in {library.path.name}: {told}"


def _timed(library: Compiled) -> tuple[bool, str]:
    plain = compiled(False)
    ours, theirs = (_best_s(one) for one in (library, plain))
    return (
        ours * 1.5 < theirs,
        f"silu of {VALUES} values takes {ours * 1e3:.2f} ms, without vectors {theirs * 1e3:.2f} ms",
    )


def _best_s(library: Compiled) -> float:
    x = torch.ones(VALUES)
    out, taken = torch.empty_like(x), []
    for _ in range(5):
        began = time.perf_counter()
        library.silu(0, x.data_ptr(), out.data_ptr(), VALUES, 1)
        taken.append(time.perf_counter() - began)
    return min(taken)
