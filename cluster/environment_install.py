"""One environment put on disk: `python -m venv`, pip, and the proof that its modules import. Output goes to a log."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from cluster.errors import UserError
from cluster.pip_progress import PipProgress, Progress
from cluster.recipes import TORCH_INDEX, Recipe

TAIL_LINES = 8
COMMAND = "\n$ "
# These would send packages elsewhere, or let the caller's own packages be seen in the new environment.
NOT_INHERITED = {
    "PYTHONPATH",
    "PYTHONHOME",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_USER",
    "PIP_REQUIRE_VIRTUALENV",
}
PIP_OPTIONS = ("--no-input", "--progress-bar=off", "--disable-pip-version-check", "--no-cache-dir")


@dataclass(frozen=True, slots=True)
class InstallFolder:
    """Where one environment is made. `lock` is a descriptor that each process started here keeps open until it ends."""

    folder: Path
    temporary: Path
    log: Path
    lock: int


def interpreter_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def has_pip() -> bool:
    """Whether this interpreter has pip. Setuptools' own finder, asked too, warns once torch has been imported."""
    return PathFinder.find_spec("pip") is not None


def install(recipe: Recipe, at: InstallFolder, progress: Progress) -> None:
    """Make the environment. Raises UserError with the end of the log; the caller removes what is left of the folder."""
    at.log.write_text("")
    at.temporary.mkdir()
    python = str(interpreter_of(at.folder))
    # The running interpreter's pip can install into another environment: that one then needs no copy of it.
    own_pip = has_pip()
    venv = [sys.executable, "-m", "venv", *(["--without-pip"] if own_pip else []), str(at.folder)]
    if _run(venv, at, lambda line: None):
        raise _failed(recipe, at, "could not be created", "on Debian and Ubuntu: apt install python3-venv; ")
    if recipe.packages:
        wanted = at.folder / "requirements.txt"
        wanted.write_text(recipe.requirements)
        pip = [sys.executable, "-m", "pip", "--python", python] if own_pip else [python, "-m", "pip"]
        narrate = PipProgress(len(recipe.packages), progress)
        # Not on the command line: the log keeps that, and an index may be named with a password.
        first = [(["--no-deps", one], {"PIP_INDEX_URL": index}) for one, index in recipe.elsewhere]
        for what, settings in (*first, (["-r", str(wanted)], {})):
            if _run([*pip, "install", *PIP_OPTIONS, *what], at, narrate, settings):
                raise _failed(recipe, at, "failed to install")
    if recipe.modules:
        progress(f"checking that {', '.join(recipe.modules)} can be imported")
        if _run([python, "-I", "-c", f"import {', '.join(recipe.modules)}"], at, lambda line: None):
            raise _failed(recipe, at, "was installed, but does not work")


def _run(
    command: Sequence[str], at: InstallFolder, hear: Callable[[str], None], settings: Mapping[str, str] | None = None
) -> int:
    """The exit code; `settings` are variables to set. When this is interrupted, nothing of it runs on."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Wheels are put beside the environment, not in the system's temporary folder: that disk was checked.
        env={k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
        | {"TMPDIR": str(at.temporary), **(settings or {})},
        pass_fds=(at.lock,),
        start_new_session=True,
    )
    try:
        for line in _logged(process, command, at.log):
            hear(line)
        return process.wait()
    finally:
        if process.poll() is None:  # not yet reaped, so the group's number is still its own
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout:
            process.stdout.close()


def _logged(process: "subprocess.Popen[str]", command: Sequence[str], path: Path) -> Iterator[str]:
    with path.open("a") as log:
        log.write(f"{COMMAND}{' '.join(command)}\n")
        for line in process.stdout or ():
            log.write(line)
            log.flush()
            yield line


def _failed(recipe: Recipe, at: InstallFolder, what: str, remedy: str = "") -> UserError:
    output = at.log.read_text(errors="replace").rpartition(COMMAND)[2]
    lines = [line.rstrip()[:300] for line in output.splitlines()[1:] if line.strip()]
    tail = "".join(f"\n  {line}" for line in lines[-TAIL_LINES:])
    if recipe.elsewhere:
        remedy += f"with {TORCH_INDEX} set to nothing, the usual build is taken; "
    return UserError(f"environment {recipe.name!r} {what}:{tail}", f"{remedy}the whole log: {at.log}")
