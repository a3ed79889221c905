"""All dtypes a checkpoint may have: size in bytes, and name in safetensors. Used by the server, so no torch.

A dtype without a safetensors code is stored as raw U8 bytes, with its name in the manifest, so that any safetensors
tool opens the file. The codes are those of safetensors 0.4, the oldest version still in wide use.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype with torch's `name`. `packed`: several values in a byte, or opaque bits, which torch only copies."""

    name: str
    bytes: int
    safetensors: str = ""
    packed: bool = False

    @property
    def code(self) -> str:
        return self.safetensors or "U8"


_PLAIN = (
    Dtype("bool", 1, "BOOL"),
    Dtype("uint8", 1, "U8"),
    Dtype("int8", 1, "I8"),
    Dtype("uint16", 2, "U16"),
    Dtype("int16", 2, "I16"),
    Dtype("uint32", 4, "U32"),
    Dtype("int32", 4, "I32"),
    Dtype("uint64", 8, "U64"),
    Dtype("int64", 8, "I64"),
    Dtype("float16", 2, "F16"),
    Dtype("bfloat16", 2, "BF16"),
    Dtype("float32", 4, "F32"),
    Dtype("float64", 8, "F64"),
    Dtype("float8_e4m3fn", 1, "F8_E4M3"),
    Dtype("float8_e5m2", 1, "F8_E5M2"),
    Dtype("float8_e4m3fnuz", 1),
    Dtype("float8_e5m2fnuz", 1),
    Dtype("float8_e8m0fnu", 1),
    Dtype("complex32", 4),
    Dtype("complex64", 8),
    Dtype("complex128", 16),
)
_PACKED = (
    *(Dtype(f"{sign}int{bits}", 1, packed=True) for sign in ("", "u") for bits in range(1, 8)),
    *(Dtype(name, 1, packed=True) for name in ("float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2")),
    Dtype("bits16", 2, packed=True),
)

DTYPES: dict[str, Dtype] = {d.name: d for d in (*_PLAIN, *_PACKED)}
FLOATS = tuple(name for name in DTYPES if name.startswith(("float", "bfloat")) and not DTYPES[name].packed)
COMPLEX = ("complex32", "complex64", "complex128")
FP8 = tuple(name for name in FLOATS if name.startswith("float8"))
INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")
"""Integer dtypes that torch can compute with everywhere. It can only store uint16, uint32 and uint64."""


def dtype_name(dtype: object) -> str:
    """Return `float32` for torch.float32, "torch.float32" and "float32"."""
    return str(dtype).removeprefix("torch.")
