"""Compiled CPU code: C++ sources, built on first use for this CPU and called through ctypes, which releases the GIL.

A node needs no compiler: each caller of `library` catches NativeUnavailable and falls back to another implementation.
`POLYFLEET_NATIVE=off` turns compiled code off. Nothing here imports torch.
"""

import ctypes
import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from workers.errors import NativeUnavailable
from workers.native.compiler import FLAGS as FLAGS
from workers.native.compiler import Compiler, check_fast_math, compile_into, find_compiler
from workers.native.store import LibraryStore

SOURCES = Path(__file__).parent / "sources"
SWITCH = "POLYFLEET_NATIVE"
_OFF = ("off", "0", "no", "false")

_lock = threading.Lock()
_libraries: dict[tuple[object, ...], "ctypes.CDLL | NativeUnavailable"] = {}


def _after_fork() -> None:
    """Replace the lock: a process forked while another thread builds would wait for it forever."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def library(
    name: str, sources: Sequence["str | Path"] = (), flags: Sequence[str] = (), build: bool = True
) -> ctypes.CDLL:
    """Return the shared library built from `sources` (default: `<name>.cpp`), relative to workers/native/sources.

    `flags` are added after FLAGS. Functions must be `extern "C"`; the caller sets their `argtypes` and `restype`.
    A library is built once per node for these sources, the headers beside them, these flags, this compiler and this
    CPU, and loaded once per process. A failure is not retried in this process. If `build` is false, only a library that
    was built earlier is loaded. Raises NativeUnavailable if compiled code is turned off, or cannot be built or loaded;
    ValueError for flags that change the arithmetic of the entire process.
    """
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        raise ValueError(f"{name!r} cannot be the name of a library: use letters, digits and '_'")
    check_fast_math(flags)
    if reason := disabled_reason():
        raise NativeUnavailable(reason)
    paths = tuple(SOURCES / source for source in sources or [f"{name}.cpp"])
    key = (name, paths, tuple(flags), os.environ.get("CXX", ""))
    with _lock:
        loaded = _libraries.get(key) or _find_or_build(name, paths, tuple(flags), build)
        if loaded is None:
            raise NativeUnavailable(f"the library {name} has not been built on this node yet")
        _libraries[key] = loaded
    if isinstance(loaded, NativeUnavailable):
        raise NativeUnavailable(loaded.reason)
    return loaded


def unavailable_reason() -> str:
    """Return why this process cannot use compiled code, or "". Builds a library of one function once to check."""
    try:
        probe = library("probe")
    except NativeUnavailable as e:
        return e.reason
    return "" if probe.polyfleet_probe(20) == 41 else "a library that the compiler built computes a wrong result"


def disabled_reason() -> str:
    """Return a message if the environment turns compiled code off, else ""."""
    value = os.environ.get(SWITCH, "")
    return f"{SWITCH}={value} turns compiled code off" if value.strip().lower() in _OFF else ""


def _find_or_build(
    name: str, sources: tuple[Path, ...], flags: tuple[str, ...], build: bool
) -> "ctypes.CDLL | NativeUnavailable | None":
    try:
        return _load(name, sources, flags, find_compiler(), build)
    except NativeUnavailable as e:
        return e


def _load(
    name: str, sources: tuple[Path, ...], flags: tuple[str, ...], compiler: Compiler, build: bool
) -> ctypes.CDLL | None:
    """Load the library from the store, after building it there if necessary.

    If the store is unusable, or nothing can be loaded from it (a file system mounted noexec), build it in a temporary
    folder of this process. Return None if it is not built and `build` is false.
    """
    store, key = LibraryStore(), compiler.key(sources, flags)
    with suppress(OSError):
        if path := store.find(name, key):
            return ctypes.CDLL(str(path))
    if not build:
        return None
    try:
        with TemporaryDirectory(prefix="polyfleet-native-") as folder:
            built = Path(folder) / f"{name}.so"
            compile_into(built, sources, flags, compiler)
            with suppress(OSError):
                if stored := store.add(name, key, built):
                    return ctypes.CDLL(str(stored))
            return ctypes.CDLL(str(built))  # the file may be deleted once it is loaded
    except OSError as e:
        where = f"; {store.reason}" if store.reason else ""
        raise NativeUnavailable(f"the library {name} cannot be built or loaded: {e}{where}") from e
