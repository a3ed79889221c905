"""Check that a library's switch took effect: run a workload with the library on or off and observe what computed it.

A benchmark with `oneDNN off` stores this evidence with its numbers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from cluster.errors import FleetError, UserError
from workers.devices.libraries.library import EffectCheck, Library

TIMEOUT_S = 180.0


def check_effect(library: Library, on: bool) -> EffectCheck:
    """Run the workload in this process if the library has a switch, else in a new process.

    Raises UserError if the library is unavailable, cannot be set to that state, or has no workload that shows it.
    """
    library.require()
    if library.observe is None or (library.switch is None and not library.launcher and on not in library.fresh):
        raise UserError(
            f"no check shows whether {library.display_name} is {_on_off(on)}",
            f"libraries with a check here: {', '.join(checkable_libraries())}",
        )
    if library.switch is not None:
        with library.enable() if on else library.disable():
            is_on, evidence = library.observe()
    else:
        is_on, evidence = _in_a_fresh_process(library, on)
    return EffectCheck(library.name, on, is_on == on, evidence)


def checkable_libraries() -> list[str]:
    from workers.devices.libraries.registry import LIBRARIES

    return [name for name, library in LIBRARIES.items() if library.observe is not None and library.available]


def run_in_new_process(library: Library, on: bool, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run Python with `argv` in a new process with the library on or off, by its variables or its launcher.

    Raises UserError if the library cannot be set to that state.
    """
    if not library.launcher and on not in library.fresh:
        raise UserError(f"{library.display_name} cannot be switched {_on_off(on)}", library._alternative(on))
    launcher = (
        [sys.executable, *library.launcher[1:], "--no-python", "--disable-numactl"] if library.launcher and on else []
    )
    unset = {name for state in library.fresh.values() for name in state}
    inherited = {
        k: v for k, v in os.environ.items() if k not in unset and not (library.launcher and k.startswith("OMP_"))
    }
    environment = {
        **inherited,
        **library.fresh.get(on, {}),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *_path()]),
    }
    command = [*launcher, sys.executable, *argv]
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise FleetError(
            f"{command[-1]} did not finish within {TIMEOUT_S:g} s",
            "run `python -c 'import torch'` to check that torch imports",
        ) from None


def _path() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def _in_a_fresh_process(library: Library, on: bool) -> tuple[bool, str]:
    process = run_in_new_process(library, on, ["-m", "workers.devices.libraries", "--observe", library.name])
    replies = [line for line in process.stdout.splitlines() if line.startswith('{"seen"')]
    if process.returncode or not replies:
        error = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise FleetError(
            f"the process that checks {library.display_name} failed: {error}",
            f"run `python -m workers.devices.libraries --observe {library.name}` to see the error",
        )
    reply = json.loads(replies[-1])
    # MKL itself prints its calls to stdout, one line per matrix product, before the JSON line.
    if calls := [line for line in process.stdout.splitlines() if line.startswith("MKL_VERBOSE") and "GEMM" in line]:
        return True, calls[0]
    return reply["seen"], reply["evidence"]


def _on_off(on: bool) -> str:
    return "on" if on else "off"
