"""Proofs: the library's workload is run with it on or off, and what ran is looked at. The number and its proof belong
together: a benchmark that says `oneDNN off` keeps this beside it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from cluster.errors import FleetError, UserError
from workers.libraries.library import EffectCheck, Library

TIMEOUT_S = 180.0


def check_effect(library: Library, on: bool) -> EffectCheck:
    """With a switch in this process, else in a fresh one. Raises UserError where it is not here, or where there is
    neither a way to that state nor a workload that would show it.
    """
    library.require()
    if library.seen is None or (library.switch is None and not library.launcher and on not in library.fresh):
        raise UserError(
            f"nothing shows {library.display_name} {_word(on)}",
            f"libraries with a check here: {', '.join(checkable_libraries())}",
        )
    if library.switch is not None:
        with library.enable() if on else library.disable():
            seen, evidence = library.seen()
    else:
        seen, evidence = _in_a_fresh_process(library, on)
    return EffectCheck(library.name, on, seen == on, evidence)


def checkable_libraries() -> list[str]:
    from workers.libraries.registry import LIBRARIES

    return [name for name, library in LIBRARIES.items() if library.seen is not None and library.available]


def run_in_new_process(library: Library, on: bool, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """A Python command in a new process with the library on or off: its variables set, or through its launcher.

    `argv` is what follows the interpreter. Raises UserError where there is no way to that state.
    """
    if not library.launcher and on not in library.fresh:
        raise UserError(f"{library.display_name} cannot be switched {_word(on)}", library._otherwise(on))
    launcher = (
        [sys.executable, *library.launcher[1:], "--no-python", "--disable-numactl"] if library.launcher and on else []
    )
    unset = {name for state in library.fresh.values() for name in state}
    kept = {k: v for k, v in os.environ.items() if k not in unset and not (library.launcher and k.startswith("OMP_"))}
    given = {
        **kept,
        **library.fresh.get(on, {}),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *_path()]),
    }
    command = [*launcher, sys.executable, *argv]
    try:
        return subprocess.run(command, env=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise FleetError(f"{command[-1]} gave no answer within {TIMEOUT_S:g} s", "see whether torch imports") from None


def _path() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def _in_a_fresh_process(library: Library, on: bool) -> tuple[bool, str]:
    done = run_in_new_process(library, on, ["-m", "workers.libraries.workload_main", library.name])
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"seen"')]
    if done.returncode or not answers:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FleetError(f"the process that was to show {library.display_name} failed: {said}", "run it by hand")
    told = json.loads(answers[-1])
    # MKL tells its calls on stdout by itself: one line per product, before ours.
    if calls := [line for line in done.stdout.splitlines() if line.startswith("MKL_VERBOSE") and "GEMM" in line]:
        return True, calls[0]
    return told["seen"], told["evidence"]


def _word(on: bool) -> str:
    return "on" if on else "off"
