"""References to tensors in imported files, read from the calls with which torch rebuilds them.

torch.load calls these functions; here their arguments are read as data. Each argument is applied or refused by name:
one that is overlooked would change numbers silently. Source: torch/_utils.py and torch/_tensor.py of torch 2.13; for
tensors of torch-xla, also those of torch 1.5 to 1.12.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from workers.checkpoint.exchange.pickles.pickle_symbols import PickledCall, name_of
from workers.checkpoint.format.dtypes import COMPLEX, DTYPES

_TYPED = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
    **{f"{name}Storage": name.lower() for name in ("QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4")},
}  # fmt: skip
_QUANTIZED_BYTES = {"qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}
"""Item sizes of quantized storages. Their tensors are refused by name once their position has been read."""
MAX_DIMENSIONS = 64
CAN_NEGATE = ("float16", "bfloat16", "float32", "float64", *COMPLEX)
"""Dtypes for which torch sets the negative bit: .imag of a conjugated tensor, or what was made of it."""
_COUNTS = {"_rebuild_tensor": (4, 4), "_rebuild_tensor_v2": (6, 7), "_rebuild_tensor_v3": (7, 8)}


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
    """A tensor in a file: elements of `storage` from `offset` on.
    `conj` and `neg` are the bits with which torch marks numbers that it still has to conjugate or negate.
    """

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conj: bool = False
    neg: bool = False

    @property
    def device(self) -> str:
        return self.storage.device

    @property
    def sign_bytes(self) -> tuple[int, ...]:
        """Bytes of each element whose highest bit must be flipped to apply `conj` and `neg`."""
        last = DTYPES[self.dtype].bytes - 1
        if self.dtype not in COMPLEX:
            return (last,) * self.neg
        return (last // 2,) * self.neg + (last,) * (self.neg != self.conj)


@dataclass(frozen=True, eq=False)
class InlineTensor:
    """A tensor whose values are in the pickle itself. `array` has elements of the same number and size."""

    dtype: str
    array: "np.ndarray[Any, Any]"
    device: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)


@dataclass(frozen=True, eq=False)
class Parts:
    """A tensor that is sharded over ranks: each part by its start."""

    shape: tuple[int, ...]
    parts: dict[tuple[int, ...], Reference]

    @property
    def dtype(self) -> str:
        return next(iter(self.parts.values())).dtype

    @property
    def device(self) -> str:
        return ""


ForeignTensor = Reference | InlineTensor | Parts


@dataclass(frozen=True, slots=True)
class RebuiltTensor:
    """A tensor, and what torch.load would set on it beyond its values."""

    tensor: Reference
    requires_grad: Any = False
    hooks: Any = None


def read_tensor(call: PickledCall) -> RebuiltTensor:
    """Read the arguments of torch._utils._rebuild_tensor, _v2 and _v3. Raises ValueError, TypeError with the reason."""
    name = call.what.rpartition(".")[2]
    minimum, maximum = _COUNTS[name]
    if not minimum <= len(call.arguments) <= maximum:
        raise ValueError(f"{len(call.arguments)} arguments; {minimum} to {maximum} are supported")
    storage, offset, shape, strides, *optional = call.arguments
    if not isinstance(storage, Storage):
        raise TypeError("a storage is expected")
    shape, strides = _sizes(shape), _sizes(strides)
    if len(shape) != len(strides) or type(offset) is not int or not 0 <= offset < 2**63:
        raise ValueError("offset, sizes and strides do not fit each other")
    dtype = dtype_of(optional[2]) if name.endswith("_v3") else storage.dtype
    metadata = call.arguments[maximum - 1] if optional and len(call.arguments) == maximum else None
    conj, neg = _conj_and_neg(metadata, dtype)
    return RebuiltTensor(Reference(storage, dtype, offset, shape, strides, conj, neg), *optional[:2])


def dtype_of(value: Any) -> str:
    """Return the dtype that a global such as torch.float32 names. Raises ValueError."""
    module, _, name = name_of(value).rpartition(".")
    if module != "torch" or name not in DTYPES:
        raise ValueError(f"its dtype is {name_of(value) or 'none'}")
    return name


def tensor_from_array(array: "np.ndarray[Any, Any]", dtype: str, device: str) -> InlineTensor:
    """Build a tensor of torch-xla from before torch 1.13: numpy's values, for bfloat16 as float32.
    Raises ValueError if dtype and values differ in any other respect, or if numbers would be rounded.
    """
    native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape)
    if native.dtype.name == dtype:
        return InlineTensor(dtype, native, device)
    if (native.dtype.name, dtype) != ("float32", "bfloat16"):
        raise ValueError(f"values of {native.dtype.name} are declared as {dtype}")
    bits = native.view(np.uint32)
    if (bits & 0xFFFF).any():
        raise ValueError("values of float32 are declared as bfloat16, which cannot represent them all")
    return InlineTensor(dtype, np.asarray(bits >> 16).astype(np.uint16), device)


def _sizes(value: Any) -> tuple[int, ...]:
    """Read a tuple, a list or a torch.Size."""
    if isinstance(value, PickledCall) and value.what == "torch.Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS:
        raise ValueError("sizes and strides of a tensor are not tuples")
    if any(type(n) is not int or not 0 <= n < 2**63 for n in value):
        raise ValueError("sizes and strides of a tensor are not integers")
    return tuple(value)


def _conj_and_neg(metadata: Any, dtype: str) -> tuple[bool, bool]:
    """Return the conjugate and the negative bit. torch checks only keys: the value False sets a bit, too."""
    if metadata is None:
        return False, False
    if not isinstance(metadata, dict) or any(key not in ("conj", "neg") for key in metadata):
        raise ValueError("its metadata has more than the bits conj and neg")
    if any(value is not True for value in metadata.values()):
        raise ValueError("its metadata has a bit that is not True")
    conj, neg = "conj" in metadata, "neg" in metadata
    if (conj and dtype not in COMPLEX) or (neg and dtype not in CAN_NEGATE):
        raise ValueError(f"{'conj' if conj and dtype not in COMPLEX else 'neg'} is set for {dtype}")
    return conj, neg


def storage_dtype(kind: str) -> "str | None":
    """Return the dtype of a storage class such as `torch.FloatStorage`; None for any other."""
    return _TYPED.get(kind.rpartition(".")[2])


def item_bytes(dtype: str) -> int:
    """Return the size of one element."""
    return _QUANTIZED_BYTES[dtype] if dtype in _QUANTIZED_BYTES else DTYPES[dtype].bytes
