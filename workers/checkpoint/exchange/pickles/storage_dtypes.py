"""Dtypes of storages, by the class names in pickles of torch.save."""

from workers.checkpoint.format.dtypes import DTYPES

_TYPED = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
    **{f"{name}Storage": name.lower() for name in ("QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4")},
}  # fmt: skip
_QUANTIZED_BYTES = {"qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}
"""Item sizes of quantized storages. Their tensors are refused by name once their position has been read."""


def dtype_of(kind: str) -> "str | None":
    """Return the dtype of a storage class such as `torch.FloatStorage`; None for any other."""
    return _TYPED.get(kind.rpartition(".")[2])


def item_bytes(dtype: str) -> int:
    """Return the size of one element."""
    return _QUANTIZED_BYTES[dtype] if dtype in _QUANTIZED_BYTES else DTYPES[dtype].bytes
