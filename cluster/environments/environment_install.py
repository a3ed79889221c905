"""Install one environment: `python -m venv`, pip, and a check that its modules import.

All output is written to a log.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from cluster.environments.pip_progress import PipProgress, Progress
from cluster.environments.recipes import TORCH_INDEX, Recipe
from cluster.errors import UserError

TAIL_LINES = 8
COMMAND = "\n$ "
# These would install packages elsewhere, or make the caller's own packages visible in the new environment.
NOT_INHERITED = {
    "PYTHONPATH",
    "PYTHONHOME",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_USER",
    "PIP_REQUIRE_VIRTUALENV",
}
PIP_OPTIONS = ("--no-input", "--progress-bar=off", "--disable-pip-version-check", "--no-cache-dir", "--no-compile")


@dataclass(frozen=True, slots=True)
class InstallFolder:
    """Folder in which one environment is created.

    Each process started here keeps the descriptor `lock` open until it ends.
    """

    folder: Path
    temporary: Path
    log: Path
    lock: int


def interpreter_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def has_pip() -> bool:
    """Return whether this interpreter has pip.

    `util.find_spec` would also call setuptools' finder, which warns once torch has been imported.
    """
    return PathFinder.find_spec("pip") is not None


def install(recipe: Recipe, at: InstallFolder, progress: Progress) -> None:
    """Create the environment.

    On failure raises UserError with the end of the log; the caller removes the folder.
    """
    at.log.write_text("")
    at.temporary.mkdir()
    python = str(interpreter_of(at.folder))
    # The running interpreter's pip can install into another environment, which then needs no pip of its own.
    own_pip = has_pip()
    venv = [sys.executable, "-m", "venv", *(["--without-pip"] if own_pip else []), str(at.folder)]
    if _run(venv, at, lambda line: None):
        raise _install_error(recipe, at, "could not be created", "on Debian and Ubuntu: apt install python3-venv; ")
    if recipe.packages:
        requirements_file = at.folder / "requirements.txt"
        requirements_file.write_text(recipe.requirements)
        pip = [sys.executable, "-m", "pip", "--python", python] if own_pip else [python, "-m", "pip"]
        on_line = PipProgress(len(recipe.packages), progress)
        # Not on the command line, which the log records: the index's URL may contain a password.
        first = [(["--no-deps", requirement], {"PIP_INDEX_URL": index}) for requirement, index in recipe.elsewhere]
        for options, settings in (*first, (["-r", str(requirements_file)], {})):
            if _run([*pip, "install", *PIP_OPTIONS, *options], at, on_line, settings):
                raise _install_error(recipe, at, "failed to install")
        progress("compiling to bytecode, on all cores")
        # pip would use one core. The exit code says nothing: some installed files are for other versions of Python.
        _run([python, "-I", "-m", "compileall", "-q", "-q", "-j", "0", str(at.folder / "lib")], at, lambda line: None)
    if recipe.modules:
        progress(f"checking that {', '.join(recipe.modules)} can be imported")
        if _run([python, "-I", "-c", f"import {', '.join(recipe.modules)}"], at, lambda line: None):
            raise _install_error(recipe, at, "was installed, but does not work")


def _run(
    command: Sequence[str], at: InstallFolder, on_line: Callable[[str], None], settings: Mapping[str, str] | None = None
) -> int:
    """Run a command and return its exit code. `settings` are variables to set.

    If this is interrupted, the command and its children are killed.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Wheels are built beside the environment, whose disk was checked, not in the system's temporary folder.
        env={k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
        | {"TMPDIR": str(at.temporary), **(settings or {})},
        pass_fds=(at.lock,),
        start_new_session=True,
    )
    try:
        for line in _log_lines(process, command, at.log):
            on_line(line)
        return process.wait()
    finally:
        if process.poll() is None:  # not yet reaped, so the group's number is still its own
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout:
            process.stdout.close()


def _log_lines(process: "subprocess.Popen[str]", command: Sequence[str], path: Path) -> Iterator[str]:
    with path.open("a") as log:
        log.write(f"{COMMAND}{' '.join(command)}\n")
        for line in process.stdout or ():
            log.write(line)
            log.flush()
            yield line


def _install_error(recipe: Recipe, at: InstallFolder, failure: str, remedy: str = "") -> UserError:
    output = at.log.read_text(errors="replace").rpartition(COMMAND)[2]
    lines = [line.rstrip()[:300] for line in output.splitlines()[1:] if line.strip()]
    tail = "".join(f"\n  {line}" for line in lines[-TAIL_LINES:])
    if recipe.elsewhere:
        remedy += f"set {TORCH_INDEX} to nothing to use the usual build; "
    return UserError(f"environment {recipe.name!r} {failure}:{tail}", f"{remedy}complete log: {at.log}")
