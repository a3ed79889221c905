"""Words for dtypes that people write and what they mean, by their names in torch. Nothing here imports torch."""

SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp64": "float64"}
SHORT_OF = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""What a model may be computed in, as benchmarks and measured rates call it."""
PRECISIONS = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16", "half")
"""Every word for those that a job or an option takes."""

INTEGERS = ("bool", "int16", "int32", "int64", "int8", "uint8")
FP8_FN = ("float8_e4m3fn", "float8_e5m2")
FP8_FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz")
FLOATS = ("float32", "bfloat16", "float16", "float64", "complex64", "complex128", *FP8_FN, *FP8_FNUZ)
"""Of these the catalogue says for each architecture whether it computes with them."""

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, **dict.fromkeys((*FP8_FN, *FP8_FNUZ, "int8"), 1)}


def long_name(word: str) -> str:
    """`bf16` and `BF16` as `bfloat16`. A word that is no short one is only lowered."""
    return SHORT.get(word.lower(), word.lower())


def short_name(word: str) -> str:
    """`bfloat16` as `bf16`, "" (nothing said) as `fp32`; what has no short name as it is."""
    return SHORT_OF.get(long_name(word or "float32"), word)
