"""The C++ compiler of this machine: which one, for which CPU, and running it so that it ends."""

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workers.errors import NativeUnavailable

THIS_CPU = "-mcpu=native" if platform.machine().lower() in ("aarch64", "arm64") else "-march=native"
FLAGS = ("-O3", THIS_CPU, "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-std=c++17")
_FAST_MATH = ("-ffast-math", "-Ofast", "-funsafe-math-optimizations")
"""A shared library linked with one of these sets flush-to-zero for the whole process when it is loaded."""

BUILD_LIMIT_S = 180.0
VERSION_LIMIT_S = 30.0
CHOICES = ("g++", "c++", "clang++")
CPUINFO = Path("/proc/cpuinfo")
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features", "isa", "uarch")
HEADERS = ("*.h", "*.hpp")


@dataclass(frozen=True, slots=True)
class Compiler:
    """`command` is how it is called, `version` all it says about itself."""

    command: tuple[str, ...]
    version: str

    def key(self, sources: Sequence[Path], flags: Sequence[str]) -> str:
        """SHA-256 of all that the built code follows from. Raises NativeUnavailable for a source that is not there."""
        made_of = hashlib.sha256()
        for part in (*FLAGS, *flags, *self.command, self.version, cpu_features()):
            made_of.update(part.encode() + b"\0")
        headers = {path for source in sources for pattern in HEADERS for path in source.parent.glob(pattern)}
        for path in (*sources, *sorted(headers)):
            try:
                made_of.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
            except OSError as e:
                raise NativeUnavailable(f"the source {path.name} cannot be read: {e.strerror}") from e
        return made_of.hexdigest()


def refuse_fast_math(flags: Sequence[str]) -> None:
    for flag in flags:
        if flag in _FAST_MATH:
            raise ValueError(f"{flag} would flush subnormal numbers to zero in the whole process")


def compiler_here() -> Compiler:
    """$CXX, with arguments if it has any, else the first of CHOICES. Raises NativeUnavailable."""
    named = os.environ.get("CXX", "")
    try:
        words = shlex.split(named)
    except ValueError as e:
        raise NativeUnavailable(f"CXX={named} cannot be read: {e}") from e
    if words:
        return Compiler(tuple(words), _version(tuple(words)))
    found = next((command for command in CHOICES if shutil.which(command)), None)
    if found is None:
        raise NativeUnavailable(f"no C++ compiler is installed ({', '.join(CHOICES)} were looked for)")
    return Compiler((found,), _version((found,)))


def compile_into(target: Path, sources: Sequence[Path], flags: Sequence[str], compiler: Compiler) -> None:
    """Raises NativeUnavailable with what the compiler said first."""
    _ran([*compiler.command, *FLAGS, *flags, "-o", str(target), *map(str, sources)], BUILD_LIMIT_S)
    if not target.is_file() or not target.stat().st_size:
        raise NativeUnavailable(f"{compiler.command[0]} reported no error and wrote nothing")


@cache
def cpu_features() -> str:
    """What `native` means to a compiler here: the processor's model and its features, of all kinds of core.

    From /proc/cpuinfo; elsewhere the machine's name and processor.
    """
    try:
        lines = CPUINFO.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return f"{platform.machine()} {platform.processor()}"
    told = {line for line in lines if line.partition(":")[0].strip() in _CPU_FIELDS}
    return "\n".join([platform.machine(), *sorted(told)])


@cache
def _version(command: tuple[str, ...]) -> str:
    return _ran([*command, "--version"], VERSION_LIMIT_S)


def _ran(command: Sequence[str], limit_s: float) -> str:
    """What it printed. Ends it, with all it started, after `limit_s`. Raises NativeUnavailable."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as e:
        raise NativeUnavailable(f"{command[0]} cannot be run: {e.strerror or e}") from e
    with process:
        try:
            told, _ = process.communicate(timeout=limit_s)
        except BaseException as e:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(e, subprocess.TimeoutExpired):
                raise
            raise NativeUnavailable(f"{command[0]} did not end within {limit_s:g} s") from e
    if process.returncode:
        raise NativeUnavailable(f"{command[0]} failed with exit code {process.returncode}: {_first_error(told)}")
    return told


def _first_error(told: str) -> str:
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it said nothing")[:300]
