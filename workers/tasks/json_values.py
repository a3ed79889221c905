"""Numbers of torch and NumPy as the plain values JSON takes."""

import math
from collections.abc import Mapping
from typing import Any

from cluster.errors import UserError
from cluster.untrusted_files import LARGEST_INTEGER

Number = int | float | bool | str | None


def metric(name: str, value: Any) -> Number:
    """A reported number as plain data; NaN and infinities, which JSON lacks, become "nan", "inf", "-inf", integers
    beyond 64 bits floats. A lazy tensor is computed.

    Raises UserError for what is not one number, a word or None.
    """
    if isinstance(value, str | bool) or value is None:
        return value
    if not isinstance(value, int | float):
        try:
            value = value.item()
        except (AttributeError, ValueError, RuntimeError) as e:
            remedy = "report one number per name, for a tensor its mean or its .item()"
            raise UserError(f"ctx.report({name}=...) was given {_describe(value)}", remedy) from e
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        value = _as_float(value)
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def not_finite(metrics: Mapping[str, Any], told: Mapping[str, Number]) -> str:
    """Which of `metrics` makes a training useless, in words: any that is NaN, a loss that is infinite; "" for none.
    `told` has them as plain data. A best loss so far begins as infinity, and so does a norm where a loss is scaled.
    """
    for name, value in told.items():
        if isinstance(metrics.get(name), str) or value not in ("nan", "inf", "-inf"):
            continue
        if value == "nan" or ("loss" in name.lower() and "best" not in name.lower()):
            return f"the reported {name} is {value}"
    return ""


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def plain(value: Any) -> Any:
    """What a user's function returned, as JSON takes it: numbers and nested data as they are, all else as text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    try:
        return metric("", value)
    except UserError:
        return str(value)


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
