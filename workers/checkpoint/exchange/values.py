"""What a pickle meant, as plain values: tensors by reference, numpy's arrays, a few containers; the rest refused."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workers.checkpoint.exchange.symbols import Call, name_of
from workers.checkpoint.exchange.typed import DeviceName, DtypeName, ModuleState, Namespace, PathText, TorchSize, Typed
from workers.checkpoint.format import tree
from workers.checkpoint.format.dtypes import DTYPES
from workers.checkpoint.format.tree import portable
from workers.checkpoint.format.words import text_of
from workers.errors import CheckpointError

MOST_REFUSED = 1000
MOST_VALUES = 300_000
"""That lists and dicts hold together, each counted wherever it occurs. A text or an array counts by its length, too."""
COUNTED_BYTES = 64
DEEPEST = tree.DEEPEST


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory in a file: `bytes` from `offset` on. `device` is where it was."""

    file: str
    offset: int
    bytes: int
    dtype: str
    device: str
    key: str


@dataclass(frozen=True, eq=False)
class Reference:
    """A tensor in a file: elements of `storage` from `offset` on."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Parts:
    """A tensor that ranks have cut: where each part begins in it."""

    shape: tuple[int, ...]
    parts: dict[tuple[int, ...], Reference]

    @property
    def dtype(self) -> str:
        return next(iter(self.parts.values())).dtype


@dataclass(slots=True)
class Plain:
    """Translates what symbols.read gave. `refused` has a line for everything that was left out.

    A list that is held twice becomes two, so what comes out is a tree. `size_bytes` of the pickles allow for its size:
    no honest one holds much more than it says. Raises CheckpointError beyond that.
    """

    refused: dict[str, str] = field(default_factory=dict)
    _seen: dict[Call, Any] = field(default_factory=dict)
    _left: int = MOST_VALUES
    _deep: int = 0
    _of: str = ""

    def allow(self, where: str, size_bytes: int) -> None:
        """The pickle at `where` is next."""
        self._of = where
        self._left += size_bytes

    def value(self, value: Any, where: str) -> Any:
        self._count(1)
        if isinstance(value, str | bytes | bytearray):
            self._count(len(value) // COUNTED_BYTES)
            return value
        if isinstance(value, Call):
            return self._once(value, where)
        if isinstance(value, dict | list | tuple | set | frozenset):
            return self._container(value, where)
        if name := name_of(value):
            short = name.removeprefix("torch.")
            if short in DTYPES:
                return DtypeName(short)
            return short if short != name else self._refuse(where, name)
        return value

    def _count(self, more: int) -> None:
        self._left -= more
        if self._left < 0:
            raise CheckpointError(
                f"{self._of} holds many more values than its size allows for: some hold the same ones again and again",
                "do not use this file",
            )

    def _container(self, value: Any, where: str) -> Any:
        if self._deep > DEEPEST:
            raise CheckpointError(f"{where:.200} is nested deeper than {DEEPEST}", "does it contain itself?")
        self._deep += 1
        try:
            if isinstance(value, dict):
                return self._dict(value, where)
            kind = type(value) if type(value) in (list, tuple, set, frozenset) else list
            return kind(self.value(item, f"{where}/{i}") for i, item in enumerate(value))
        finally:
            self._deep -= 1

    def _once(self, call: Call, where: str) -> Any:
        """One tensor held twice stays one. The key holds the Call: the next file's may else get its place in memory."""
        if call in self._seen:
            return self._seen[call]
        made = self._call(call, where)
        if isinstance(made, np.ndarray):
            self._count(made.nbytes // COUNTED_BYTES)
        if not isinstance(made, dict | list | tuple | set | frozenset | str | bytes):
            self._seen[call] = made
        return made

    def _dict(self, value: dict[Any, Any], where: str) -> Any:
        items = {self._key(k, where): self.value(v, f"{where}/{text_of(k)}") for k, v in dict.items(value)}
        if not isinstance(value, OrderedDict):
            return items
        if not isinstance(versions := getattr(value, "_metadata", None), dict):
            return OrderedDict(items)
        made = ModuleState(items)
        made.versions = self.value(versions, f"{where}/_metadata")
        return made

    def _key(self, key: Any, where: str) -> Any:
        made = self.value(key, where)
        return made.content() if isinstance(made, Typed) else made

    def _call(self, call: Call, where: str) -> Any:
        make = _KNOWN.get(call.what)
        if make is None:
            return self._refuse(where, call.what)
        try:
            return make(self, call, where)
        except (TypeError, ValueError, IndexError, KeyError, AttributeError, LookupError) as e:
            return self._refuse(where, f"{call.what} ({e!s:.200})")

    def _refuse(self, where: str, what: str) -> None:
        if len(self.refused) < MOST_REFUSED:
            self.refused[where] = what


def _tensor(plain: Plain, call: Call, where: str) -> Any:
    storage, offset, shape, strides = call.arguments[:4]
    shape, strides = tuple(_ints(shape)), tuple(_ints(strides))
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, Storage) or len(shape) != len(strides) or len(shape) > 64:
        raise ValueError("no tensor")
    if any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        raise ValueError("sizes and strides of a tensor are whole numbers")
    dtype = storage.dtype
    if call.what.endswith("_v3"):
        dtype = name_of(call.arguments[6]).removeprefix("torch.")
    return Reference(storage, dtype, offset, shape, strides)


def _ints(value: Any) -> Any:
    return value.arguments[0] if isinstance(value, Call) and value.what == "torch.Size" else value


def _parameter(plain: Plain, call: Call, where: str) -> Any:
    return plain.value(call.arguments[0], where)


def _array(plain: Plain, call: Call, where: str) -> Any:
    """numpy's own: _reconstruct(ndarray, (0,), b"b") and a state of (version, shape, dtype, is_fortran, bytes)."""
    _, shape, dtype, fortran, data = call.state
    kind = _dtype(dtype)
    array: np.ndarray[Any, Any] = np.frombuffer(_data(plain, data), kind)
    return array.reshape(shape, order="F" if fortran else "C").copy()


def _scalar(plain: Plain, call: Call, where: str) -> Any:
    return np.frombuffer(_data(plain, call.arguments[1]), _dtype(call.arguments[0]), count=1)[0]


def _dtype(dtype: Any) -> "np.dtype[Any]":
    """numpy.dtype("f8", …) with a state whose second item is the byte order."""
    code, order = dtype.arguments[0], dtype.state[1] if dtype.state else "|"
    if not isinstance(code, str) or len(code) > 4 or not isinstance(order, str) or order not in ("<", ">", "|", "="):
        raise ValueError("a dtype of numbers is expected")
    found = np.dtype(order + code if order in ("<", ">") else code)
    if not portable(found):
        raise ValueError(f"{found} is no portable number")
    return found


def _data(plain: Plain, value: Any) -> bytes:
    if isinstance(value, Call) and value.what == "_codecs.encode":
        text, coding = value.arguments
        if not isinstance(coding, str) or coding not in ("latin1", "latin-1") or not isinstance(text, str):
            raise ValueError("text in latin-1 is expected")
        plain._count(len(text) // COUNTED_BYTES)
        return text.encode("latin-1")
    if not isinstance(value, bytes | bytearray):
        raise TypeError("bytes are expected")
    plain._count(len(value) // COUNTED_BYTES)
    return bytes(value)


def _no_bytes(plain: Plain, call: Call, where: str) -> bytes:
    """What protocol 2 writes for b"": a call without arguments."""
    if call.arguments:
        raise ValueError("bytes of something")
    return b""


def _state(plain: Plain, call: Call, where: str) -> Any:
    return plain.value(call.state, where)


def _words(call: Call) -> list[str]:
    if not all(isinstance(item, str | int) and len(text_of(item)) <= 4096 for item in call.arguments):
        raise TypeError("words are expected")
    return [text_of(item) for item in call.arguments]


def _namespace(plain: Plain, call: Call, where: str) -> Any:
    state = plain.value(call.state, where)
    return Namespace(state) if type(state) is dict and all(type(key) is str for key in state) else state


def _path(plain: Plain, call: Call, where: str) -> str:
    return PathText("/".join(_words(call)).replace("//", "/"))


_KNOWN: dict[str, Callable[[Plain, Call, str], Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _parameter,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.Size": lambda plain, call, where: TorchSize(plain.value(call.arguments[0], where)),
    "torch.device": lambda plain, call, where: DeviceName(":".join(_words(call))),
    "argparse.Namespace": _namespace,
    "types.SimpleNamespace": _state,
    **dict.fromkeys(("builtins.bytes", "__builtin__.bytes"), _no_bytes),
    "_codecs.encode": lambda plain, call, where: _data(plain, call),
    **dict.fromkeys((f"pathlib.{name}Path" for name in ("", "Posix", "Windows", "PurePosix")), _path),
    **dict.fromkeys((f"pathlib._local.{name}Path" for name in ("", "Posix", "Windows")), _path),
    **{f"{n}.multiarray._reconstruct": _array for n in ("numpy.core", "numpy._core")},
    **{f"{n}.multiarray.scalar": _scalar for n in ("numpy.core", "numpy._core")},
}
