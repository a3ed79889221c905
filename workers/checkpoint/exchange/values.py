"""What a pickle meant, as plain values: tensors by reference, numpy's arrays, a few containers; the rest refused."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workers.checkpoint.exchange.symbols import Call, name_of
from workers.checkpoint.format.tree import portable
from workers.checkpoint.format.words import text_of

MOST_REFUSED = 1000


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
    """Translates what symbols.read gave. `refused` has a line for everything that was left out."""

    refused: dict[str, str] = field(default_factory=dict)
    _seen: dict[int, Any] = field(default_factory=dict)

    def value(self, value: Any, where: str) -> Any:
        if isinstance(value, dict):
            return self._dict(value, where)
        if isinstance(value, list | tuple | set | frozenset):
            kind = type(value) if type(value) in (list, tuple, set, frozenset) else list
            return kind(self.value(item, f"{where}/{i}") for i, item in enumerate(value))
        if isinstance(value, Call):
            if id(value) not in self._seen:  # one tensor held twice stays one
                self._seen[id(value)] = self._call(value, where)
            return self._seen[id(value)]
        if name := name_of(value):
            return name.removeprefix("torch.") if name.startswith("torch.") else self._refuse(where, name)
        return value

    def _dict(self, value: dict[Any, Any], where: str) -> Any:
        items = {self.value(k, where): self.value(v, f"{where}/{text_of(k)}") for k, v in value.items()}
        return OrderedDict(items) if isinstance(value, OrderedDict) and not isinstance(value, defaultdict) else items

    def _call(self, call: Call, where: str) -> Any:
        make = _KNOWN.get(call.what)
        if make is None:
            return self._refuse(where, call.what)
        try:
            return make(self, call, where)
        except (TypeError, ValueError, IndexError, KeyError, AttributeError, LookupError) as e:
            return self._refuse(where, f"{call.what} ({e})")

    def _refuse(self, where: str, what: str) -> None:
        if len(self.refused) < MOST_REFUSED:
            self.refused[where] = what


def _tensor(plain: Plain, call: Call, where: str) -> Any:
    storage, offset, shape, strides = call.arguments[:4]
    shape, strides = tuple(map(int, _ints(shape))), tuple(map(int, _ints(strides)))
    if not isinstance(storage, Storage) or len(shape) != len(strides) or min((0, offset, *shape, *strides)) < 0:
        raise ValueError("no tensor")
    dtype = storage.dtype
    if call.what.endswith("_v3"):
        dtype = name_of(call.arguments[6]).removeprefix("torch.")
    return Reference(storage, dtype, int(offset), shape, strides)


def _ints(value: Any) -> Any:
    return value.arguments[0] if isinstance(value, Call) and value.what == "torch.Size" else value


def _parameter(plain: Plain, call: Call, where: str) -> Any:
    return plain.value(call.arguments[0], where)


def _array(plain: Plain, call: Call, where: str) -> Any:
    """numpy's own: _reconstruct(ndarray, (0,), b"b") and a state of (version, shape, dtype, is_fortran, bytes)."""
    _, shape, dtype, fortran, data = call.state
    kind = _dtype(dtype)
    array: np.ndarray[Any, Any] = np.frombuffer(_data(data), kind)
    return array.reshape(shape, order="F" if fortran else "C").copy()


def _scalar(plain: Plain, call: Call, where: str) -> Any:
    return np.frombuffer(_data(call.arguments[1]), _dtype(call.arguments[0]), count=1)[0]


def _dtype(dtype: Any) -> "np.dtype[Any]":
    """numpy.dtype("f8", …) with a state whose second item is the byte order."""
    code, order = dtype.arguments[0], dtype.state[1] if dtype.state else "|"
    if not isinstance(code, str) or len(code) > 4 or order not in ("<", ">", "|", "="):
        raise ValueError("a dtype of numbers is expected")
    found = np.dtype(order + code if order in ("<", ">") else code)
    if not portable(found):
        raise ValueError(f"{found} is no portable number")
    return found


def _data(value: Any) -> bytes:
    if isinstance(value, Call) and value.what == "_codecs.encode":
        text, coding = value.arguments
        if coding not in ("latin1", "latin-1"):
            raise ValueError(coding)
        return str(text).encode("latin-1")
    if not isinstance(value, bytes | bytearray):
        raise TypeError("bytes are expected")
    return bytes(value)


def _state(plain: Plain, call: Call, where: str) -> Any:
    return plain.value(call.state, where)


def _path(plain: Plain, call: Call, where: str) -> str:
    return "/".join(map(str, call.arguments)).replace("//", "/")


_KNOWN: dict[str, Callable[[Plain, Call, str], Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _parameter,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.Size": lambda plain, call, where: tuple(call.arguments[0]),
    "torch.device": lambda plain, call, where: ":".join(map(str, call.arguments)),
    "argparse.Namespace": _state,
    "types.SimpleNamespace": _state,
    "_codecs.encode": lambda plain, call, where: _data(call),
    **dict.fromkeys((f"pathlib.{name}Path" for name in ("", "Posix", "Windows", "PurePosix")), _path),
    **dict.fromkeys((f"pathlib._local.{name}Path" for name in ("", "Posix", "Windows")), _path),
    **{f"{n}.multiarray._reconstruct": _array for n in ("numpy.core", "numpy._core")},
    **{f"{n}.multiarray.scalar": _scalar for n in ("numpy.core", "numpy._core")},
}
