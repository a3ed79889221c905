"""Short names of dtypes that users write, and torch's names for them. Does not import torch."""

SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp64": "float64"}
SHORT_OF = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Precisions a model may be computed in, and their names in benchmarks and measured rates."""
PRECISIONS = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16", "half")
"""Every name of a precision that a job or an option accepts."""

INTEGERS = ("bool", "int16", "int32", "int64", "int8", "uint8")
FP8_FN = ("float8_e4m3fn", "float8_e5m2")
FP8_FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz")
FLOATS = ("float32", "bfloat16", "float16", "float64", "complex64", "complex128", *FP8_FN, *FP8_FNUZ)
"""Dtypes for which the catalogue lists, per architecture, whether it can compute with them."""

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, **dict.fromkeys((*FP8_FN, *FP8_FNUZ, "int8"), 1)}


def long_name(name: str) -> str:
    """Return torch's name, e.g. `bfloat16` for `bf16` or `BF16`. Any other name is only lowered."""
    return SHORT.get(name.lower(), name.lower())


def short_name(name: str) -> str:
    """Return the short name, e.g. `bf16` for `bfloat16`; `fp32` for "".

    A name without a short one is returned as is.
    """
    return SHORT_OF.get(long_name(name or "float32"), name)
