"""Compiled CPU code: C++ sources, built on first use for this CPU, and called through ctypes, which frees the GIL.

A node needs no compiler: who asks for a library catches NativeUnavailable and has another form of the same work.
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
from workers.native.compiler import Compiler, compile_into, compiler_here, refuse_fast_math
from workers.native.store import Store

SOURCES = Path(__file__).parent / "sources"
SWITCH = "POLYFLEET_NATIVE"
_OFF = ("off", "0", "no", "false")

_lock = threading.Lock()
_known: dict[tuple[object, ...], "ctypes.CDLL | NativeUnavailable"] = {}


def _after_fork() -> None:
    """A process forked while another thread builds would wait for ever."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def library(
    name: str, sources: Sequence["str | Path"] = (), flags: Sequence[str] = (), build: bool = True
) -> ctypes.CDLL:
    """The shared library built from `sources`, by default `<name>.cpp`; relative ones lie in workers/native/sources.
    `flags` follow FLAGS. Functions need `extern "C"`, and `argtypes` and `restype` set by the caller.

    Built once per node for these sources, the headers beside them, these flags, this compiler and this CPU, and loaded
    once per process; what failed is not tried again in this process. Without `build` one that
    is not there yet is not built. Raises NativeUnavailable where compiled code is turned off, or cannot be built or
    loaded; ValueError for flags that change arithmetic in the whole process.
    """
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        raise ValueError(f"{name!r} cannot be the name of a library: use letters, digits and '_'")
    refuse_fast_math(flags)
    if reason := turned_off():
        raise NativeUnavailable(reason)
    paths = tuple(SOURCES / source for source in sources or [f"{name}.cpp"])
    key = (name, paths, tuple(flags), os.environ.get("CXX", ""))
    with _lock:
        known = _known.get(key) or _found_or_built(name, paths, tuple(flags), build)
        if known is None:
            raise NativeUnavailable(f"the library {name} was not built on this node yet")
        _known[key] = known
    if isinstance(known, NativeUnavailable):
        raise NativeUnavailable(known.reason)
    return known


def unavailable_reason() -> str:
    """Why compiled code cannot be had in this process, or "". Builds a library of one function to find out, once."""
    try:
        probe = library("probe")
    except NativeUnavailable as e:
        return e.reason
    return "" if probe.polyfleet_probe(20) == 41 else "what the compiler builds does not compute what it should"


def turned_off() -> str:
    """Why this user wants no compiled code, or ""."""
    value = os.environ.get(SWITCH, "")
    return f"{SWITCH}={value} turns compiled code off" if value.strip().lower() in _OFF else ""


def _found_or_built(
    name: str, sources: tuple[Path, ...], flags: tuple[str, ...], build: bool
) -> "ctypes.CDLL | NativeUnavailable | None":
    try:
        return _loaded(name, sources, flags, compiler_here(), build)
    except NativeUnavailable as e:
        return e


def _loaded(
    name: str, sources: tuple[Path, ...], flags: tuple[str, ...], compiler: Compiler, build: bool
) -> ctypes.CDLL | None:
    """From the store, or built into it; from a folder of this process alone where there is no store, or where nothing
    can be loaded from it, as from a file system that is mounted noexec."""
    store, key = Store(), compiler.key(sources, flags)
    with suppress(OSError):
        if found := store.find(name, key):
            return ctypes.CDLL(str(found))
    if not build:
        return None
    try:
        with TemporaryDirectory(prefix="polyfleet-native-") as folder:
            built = Path(folder) / f"{name}.so"
            compile_into(built, sources, flags, compiler)
            with suppress(OSError):
                if kept := store.keep(name, key, built):
                    return ctypes.CDLL(str(kept))
            return ctypes.CDLL(str(built))  # may be deleted once it is loaded
    except OSError as e:
        where = f"; {store.reason}" if store.reason else ""
        raise NativeUnavailable(f"the library {name} cannot be built or loaded: {e}{where}") from e
