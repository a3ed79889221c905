"""Numbers of torch and NumPy as the plain values JSON takes."""

import math
from typing import Any

from cluster.errors import UserError
from cluster.untrusted import LARGEST_INTEGER

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
