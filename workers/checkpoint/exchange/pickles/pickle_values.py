"""Translate recorded pickles to plain values: tensors by reference, numpy's arrays, a few containers.

Anything else is refused by name.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from workers.checkpoint.exchange.pickles.pickle_symbols import PickledCall, name_of
from workers.checkpoint.exchange.pickles.tensors import (
    ForeignTensor,
    Reference,
    dtype_of,
    read_tensor,
    tensor_from_array,
)
from workers.checkpoint.exchange.pickles.typed import (
    DeviceName,
    DtypeName,
    ModuleState,
    Namespace,
    PathText,
    TorchSize,
    TypedValue,
)
from workers.checkpoint.format import tree
from workers.checkpoint.format.dtypes import COMPLEX, DTYPES, FLOATS
from workers.checkpoint.format.message_text import key_text
from workers.checkpoint.format.tree import is_portable
from workers.errors import CheckpointError

MAX_REJECTED = 1000
MAX_VALUES = 300_000
"""Maximum number of values in lists and dicts together, each counted wherever it occurs. Texts and arrays also count by
length.
"""
COUNTED_BYTES = 64
MAX_DEPTH = tree.MAX_DEPTH


@dataclass(slots=True)
class PickleDecoder:
    """Translate what pickle_symbols.read returned. `refused` has a line for everything that was left out.

    A list that occurs twice is translated twice, so that the result is a tree. Its size is limited by the `size_bytes`
    of the pickles: a valid one does not have many more values than bytes. Raises CheckpointError beyond that.
    `with_grad` counts tensors that had requires_grad.
    """

    refused: dict[str, str] = field(default_factory=dict)
    with_grad: int = 0
    _translated: dict[PickledCall, Any] = field(default_factory=dict)
    _remaining_values: int = MAX_VALUES
    _depth: int = 0
    _pickle_path: str = ""

    def allow(self, path: str, size_bytes: int) -> None:
        """Announce the next pickle, `path`, and raise the limit by its size."""
        self._pickle_path = path
        self._remaining_values += size_bytes

    def value(self, value: Any, path: str) -> Any:
        self._count(1)
        if isinstance(value, str | bytes | bytearray):
            self._count(len(value) // COUNTED_BYTES)
            return value
        if isinstance(value, PickledCall):
            return self._translate_once(value, path)
        if isinstance(value, dict | list | tuple | set | frozenset):
            return self._container(value, path)
        if name := name_of(value):
            short = name.removeprefix("torch.")
            if short in DTYPES:
                return DtypeName(short)
            return short if short != name else self._refuse(path, name)
        return value

    def _count(self, count: int) -> None:
        self._remaining_values -= count
        if self._remaining_values < 0:
            raise CheckpointError(
                f"{self._pickle_path} has many more values than its size allows: some contain the same ones again and"
                " again",
                "do not use this file",
            )

    def _container(self, value: Any, path: str) -> Any:
        if self._depth > MAX_DEPTH:
            raise CheckpointError(
                f"{path:.200} is nested deeper than {MAX_DEPTH}", "check that it does not contain itself"
            )
        self._depth += 1
        try:
            if isinstance(value, dict):
                return self._dict(value, path)
            kind = type(value) if type(value) in (list, tuple, set, frozenset) else list
            return kind(self.value(item, f"{path}/{i}") for i, item in enumerate(value))
        finally:
            self._depth -= 1

    def _translate_once(self, call: PickledCall, path: str) -> Any:
        """Translate a call once, so that a tensor that occurs twice stays one.
        The key keeps the call alive: otherwise a call of the next file could get its address.
        """
        if call in self._translated:
            return self._translated[call]
        value = self._call(call, path)
        if isinstance(value, np.ndarray):
            self._count(value.nbytes // COUNTED_BYTES)
        if not isinstance(value, dict | list | tuple | set | frozenset | str | bytes):
            self._translated[call] = value
        return value

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        items = {self._key(k, path): self.value(v, f"{path}/{key_text(k)}") for k, v in dict.items(value)}
        if len(items) != len(value):
            raise CheckpointError(f"{path:.200} has two keys that are equal as plain values", "rename one of them")
        if type(value) not in (OrderedDict, Counter):
            return items
        versions = getattr(value, "_metadata", None)
        if type(value) is Counter or not isinstance(versions, dict):
            return type(value)(items)
        module_state = ModuleState(items)
        module_state.versions = self.value(versions, f"{path}/_metadata")
        return module_state

    def _key(self, key: Any, path: str) -> Any:
        return _plain_key(self.value(key, path))

    def _call(self, call: PickledCall, path: str) -> Any:
        make = _READERS.get(call.what)
        if make is None:
            description = _UNSUPPORTED.get(call.what)
            return self._refuse(path, f"{description} ({call.what})" if description else call.what)
        if call.items or call.elements or (call.state is not None and make not in (_array, _state, _namespace)):
            return self._refuse(path, f"{call.what} (with state set afterwards)")
        try:
            return make(self, call, path)
        except (TypeError, ValueError, IndexError, KeyError, AttributeError, LookupError) as e:
            return self._refuse(path, f"{call.what} ({e!s:.200})")

    def check_attributes(self, path: str, tensor: Any, requires_grad: Any, hooks: Any, attributes: Any = None) -> None:
        """Check what torch.load would set on a tensor beyond its values.
        `path` locates it in the file's values; `tensor` is None if it was refused.
        """
        if type(requires_grad) is not bool:
            raise TypeError("requires_grad is neither True nor False")
        if requires_grad and tensor is not None and tensor.dtype not in (*FLOATS, *COMPLEX):
            raise ValueError(f"{tensor.dtype} cannot require gradients")
        self.with_grad += requires_grad
        if hooks is not None and (not isinstance(hooks, dict) or hooks):
            self._refuse(f"{path}._backward_hooks", "backward hook of a tensor")
        for part in attributes if isinstance(attributes, tuple) else (attributes,):
            if part is not None and not isinstance(part, dict):
                raise TypeError("its attributes are not a dict")
            for name in part or ():
                self._refuse(f"{path}.{key_text(name)}", "Python attribute of a tensor")

    def _refuse(self, path: str, description: str) -> None:
        if len(self.refused) < MAX_REJECTED:
            self.refused[path] = description


def _plain_key(key: Any) -> Any:
    """Return a key of plain types only: a checkpoint's JSON has no leaves in keys."""
    value = key.content() if isinstance(key, TypedValue) else key
    return type(value)(map(_plain_key, value)) if type(value) in (tuple, frozenset) else value


def _tensor(plain: PickleDecoder, call: PickledCall, path: str) -> Any:
    rebuilt = read_tensor(call)
    plain.check_attributes(path, rebuilt.tensor, rebuilt.requires_grad, rebuilt.hooks)
    return rebuilt.tensor


def _parameter(plain: PickleDecoder, call: PickledCall, path: str) -> Any:
    data, requires_grad, hooks = call.arguments
    return _with_attributes(plain, data, requires_grad, hooks, None, path)


def _parameter_with_state(plain: PickleDecoder, call: PickledCall, path: str) -> Any:
    data, requires_grad, hooks, state = call.arguments
    return _with_attributes(plain, data, requires_grad, hooks, state, path)


def _typed_tensor(plain: PickleDecoder, call: PickledCall, path: str) -> Any:
    """Read a tensor with Python attributes. Subclasses are refused: only their class defines what they mean."""
    rebuild, kind, arguments, state = call.arguments
    if name_of(kind) not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        raise ValueError(f"of the class {name_of(kind)}")
    if not name_of(rebuild) or not isinstance(arguments, tuple):
        raise ValueError("rebuilt by something other than a function")
    return _with_attributes(plain, rebuild(*arguments), False, None, state, path)


def _with_attributes(plain: PickleDecoder, data: Any, requires_grad: Any, hooks: Any, state: Any, path: str) -> Any:
    tensor = plain.value(data, path)
    if tensor is not None and not isinstance(tensor, ForeignTensor):
        raise TypeError(f"made of a {type(tensor).__name__}")
    plain.check_attributes(path, tensor, requires_grad, hooks, state)
    return tensor


def _device_tensor(plain: PickleDecoder, call: PickledCall, path: str) -> Any:
    """Read a tensor of a device without storages, such as XLA: values as on the CPU, dtype and device."""
    data, dtype, device, requires_grad = call.arguments
    tensor, device = plain.value(data, path), plain.value(device, path)
    if not isinstance(device, str):
        raise TypeError("its device is not text")
    if isinstance(tensor, np.ndarray):
        tensor = tensor_from_array(tensor, dtype_of(dtype), str(device))
    elif isinstance(tensor, Reference) and tensor.dtype == dtype_of(dtype):
        tensor = replace(tensor, storage=replace(tensor.storage, device=str(device)))
    elif tensor is not None:
        raise ValueError(
            f"values of {getattr(tensor, 'dtype', type(tensor).__name__)} are declared as {dtype_of(dtype)}"
        )
    plain.check_attributes(path, tensor, requires_grad, None)
    return tensor


def _array(plain: PickleDecoder, call: PickledCall, path: str) -> Any:
    """Read _reconstruct(ndarray, (0,), b"b") with state (version, shape, dtype, is_fortran, bytes)."""
    _, shape, dtype, fortran, data = call.state
    if name_of(call.arguments[0]) != "numpy.ndarray":
        raise ValueError(f"of the class {name_of(call.arguments[0])}")
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("sizes of an array are not integers")
    array: np.ndarray[Any, Any] = np.frombuffer(_data(plain, data), _dtype(dtype))
    return array.reshape(shape, order="F" if fortran else "C").copy()


def _scalar(plain: PickleDecoder, call: PickledCall, path: str) -> Any:
    dtype, data = call.arguments
    (value,) = np.frombuffer(_data(plain, data), _dtype(dtype))
    return value


def _dtype(dtype: Any) -> "np.dtype[Any]":
    """Read numpy.dtype("f8", …) with a state whose second item is the byte order."""
    code, order = dtype.arguments[0], dtype.state[1] if dtype.state else "|"
    if dtype.state and any(part is not None for part in dtype.state[2:5]):
        raise ValueError("a dtype without fields is expected")
    if not isinstance(code, str) or len(code) > 4 or not isinstance(order, str) or order not in ("<", ">", "|", "="):
        raise ValueError("a dtype of numbers is expected")
    result = np.dtype(order + code if order in ("<", ">") else code)
    if not is_portable(result):
        raise ValueError(f"{result} is not a portable number type")
    return result


def _data(plain: PickleDecoder, value: Any) -> bytes:
    """Return bytes as pickles of protocol 2 have them: text in latin-1, or an empty call of `bytes`."""
    if isinstance(value, PickledCall) and value.what in _BYTES and not value.arguments:
        return b""
    if isinstance(value, PickledCall) and value.what == "_codecs.encode":
        text, coding = value.arguments
        if not isinstance(coding, str) or coding not in ("latin1", "latin-1") or not isinstance(text, str):
            raise ValueError("text in latin-1 is expected")
        plain._count(len(text) // COUNTED_BYTES)
        return text.encode("latin-1")
    if not isinstance(value, bytes | bytearray):
        raise TypeError("bytes are expected")
    plain._count(len(value) // COUNTED_BYTES)
    return bytes(value)


def _size(plain: PickleDecoder, call: PickledCall, path: str) -> TorchSize:
    (sizes,) = call.arguments
    size = TorchSize(plain.value(sizes, path))
    if any(type(n) is not int for n in size):
        raise TypeError("its sizes are not integers")
    return size


def _state(plain: PickleDecoder, call: PickledCall, path: str) -> Any:
    return plain.value(call.state, path)


def _texts(call: PickledCall) -> list[str]:
    if not all(isinstance(item, str | int) and len(key_text(item)) <= 4096 for item in call.arguments):
        raise TypeError("short texts are expected")
    return [key_text(item) for item in call.arguments]


def _namespace(plain: PickleDecoder, call: PickledCall, path: str) -> Any:
    state = plain.value(call.state, path)
    return Namespace(state) if type(state) is dict and all(type(key) is str for key in state) else state


def _path(plain: PickleDecoder, call: PickledCall, path: str) -> str:
    return PathText("/".join(_texts(call)).replace("//", "/"))


_BYTES = ("builtins.bytes", "__builtin__.bytes")
_READERS: dict[str, Callable[[PickleDecoder, PickledCall, str], Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _device_tensor,
    "torch._utils._rebuild_device_tensor_from_numpy": _device_tensor,
    "torch._utils._rebuild_xla_tensor": _device_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
    "torch._tensor._rebuild_from_type_v2": _typed_tensor,
    "torch.Size": _size,
    "torch.device": lambda plain, call, path: DeviceName(":".join(_texts(call))),
    "argparse.Namespace": _namespace,
    "types.SimpleNamespace": _state,
    **dict.fromkeys(("_codecs.encode", *_BYTES), lambda plain, call, path: _data(plain, call)),
    **dict.fromkeys((f"pathlib.{name}Path" for name in ("", "Posix", "Windows", "PurePosix")), _path),
    **dict.fromkeys((f"pathlib._local.{name}Path" for name in ("", "Posix", "Windows")), _path),
    **{f"{n}.multiarray._reconstruct": _array for n in ("numpy.core", "numpy._core")},
    **{f"{n}.multiarray.scalar": _scalar for n in ("numpy.core", "numpy._core")},
}

_UNSUPPORTED = {
    "torch._utils._rebuild_qtensor": "quantized tensor",
    "torch._utils._rebuild_sparse_tensor": "sparse tensor",
    "torch._utils._rebuild_sparse_csr_tensor": "sparse tensor",
    "torch._utils._rebuild_nested_tensor": "nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "tensor on the meta device, without values",
    "torch._utils._rebuild_wrapper_subclass": "tensor of a subclass, without values of its own",
}
"""Tensors that a checkpoint cannot store, with a description."""
