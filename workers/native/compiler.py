"""Find this machine's C++ compiler, identify the CPU it compiles for, and run it with a time limit."""

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
"""Loading a shared library linked with one of these sets flush-to-zero for the entire process."""

BUILD_LIMIT_S = 180.0
VERSION_LIMIT_S = 30.0
COMPILERS = ("g++", "c++", "clang++")
CPUINFO = Path("/proc/cpuinfo")
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features", "isa", "uarch")
HEADERS = ("*.h", "*.hpp")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler: `command` starts it, `version` is the output of its `--version`."""

    command: tuple[str, ...]
    version: str

    def key(self, sources: Sequence[Path], flags: Sequence[str]) -> str:
        """SHA-256 of everything that determines the built code. Raises NativeUnavailable if a source cannot be read."""
        digest = hashlib.sha256()
        for part in (*FLAGS, *flags, *self.command, self.version, cpu_features()):
            digest.update(part.encode() + b"\0")
        headers = {path for source in sources for pattern in HEADERS for path in source.parent.glob(pattern)}
        for path in (*sources, *sorted(headers)):
            try:
                digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
            except OSError as e:
                raise NativeUnavailable(f"the source {path.name} cannot be read: {e.strerror}") from e
        return digest.hexdigest()


def check_fast_math(flags: Sequence[str]) -> None:
    for flag in flags:
        if flag in _FAST_MATH:
            raise ValueError(f"{flag} would flush subnormal numbers to zero in the entire process")


def find_compiler() -> Compiler:
    """Return $CXX, with its arguments, else the first of COMPILERS that is installed. Raises NativeUnavailable."""
    named = os.environ.get("CXX", "")
    try:
        arguments = shlex.split(named)
    except ValueError as e:
        raise NativeUnavailable(f"CXX={named} cannot be parsed: {e}") from e
    if arguments:
        return Compiler(tuple(arguments), _version(tuple(arguments)))
    program = next((command for command in COMPILERS if shutil.which(command)), None)
    if program is None:
        raise NativeUnavailable(f"no C++ compiler is installed (searched for {', '.join(COMPILERS)})")
    return Compiler((program,), _version((program,)))


def compile_into(target: Path, sources: Sequence[Path], flags: Sequence[str], compiler: Compiler) -> None:
    """Compile `sources` to the library `target`. Raises NativeUnavailable with the compiler's first error."""
    _run([*compiler.command, *FLAGS, *flags, "-o", str(target), *map(str, sources)], BUILD_LIMIT_S)
    if not target.is_file() or not target.stat().st_size:
        raise NativeUnavailable(f"{compiler.command[0]} reported no error and wrote nothing")


@cache
def cpu_features() -> str:
    """Describe what `native` means to a compiler here: model and features of every kind of core in the processor.

    Source: /proc/cpuinfo; on systems without it the machine's architecture and processor name.
    """
    try:
        lines = CPUINFO.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return f"{platform.machine()} {platform.processor()}"
    features = {line for line in lines if line.partition(":")[0].strip() in _CPU_FIELDS}
    return "\n".join([platform.machine(), *sorted(features)])


@cache
def _version(command: tuple[str, ...]) -> str:
    return _run([*command, "--version"], VERSION_LIMIT_S)


def _run(command: Sequence[str], limit_s: float) -> str:
    """Run `command` and return its output. Kills its process group after `limit_s`. Raises NativeUnavailable."""
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
            output, _ = process.communicate(timeout=limit_s)
        except BaseException as e:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(e, subprocess.TimeoutExpired):
                raise
            raise NativeUnavailable(f"{command[0]} did not end within {limit_s:g} s") from e
    if process.returncode:
        raise NativeUnavailable(f"{command[0]} failed with exit code {process.returncode}: {_first_error(output)}")
    return output


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it printed nothing")[:300]
