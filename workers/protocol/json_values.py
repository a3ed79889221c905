"""Convert numbers of torch and NumPy to plain values for JSON."""

import math
from collections.abc import Mapping
from typing import Any

from cluster.errors import UserError
from cluster.input.untrusted_files import MAX_INTEGER

Number = int | float | bool | str | None


def metric(name: str, value: Any) -> Number:
    """Convert a reported metric to a plain value. A lazy tensor is computed.

    NaN and infinities, which JSON lacks, become "nan", "inf", "-inf"; integers beyond 64 bits become floats. Raises
    UserError for a value that is not a single number, a string or None.
    """
    if isinstance(value, str | bool) or value is None:
        return value
    if not isinstance(value, int | float):
        try:
            value = value.item()
        except (AttributeError, ValueError, RuntimeError) as e:
            remedy = "report one number per name, for a tensor its mean or its .item()"
            raise UserError(f"ctx.report({name}=...) received {_describe(value)}", remedy) from e
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        value = _as_float(value)
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def not_finite(metrics: Mapping[str, Any], plain_values: Mapping[str, Number]) -> str:
    """Return why `metrics` make further training useless: a metric is NaN or a loss is infinite; "" if none is.

    `plain_values` has the metrics as plain data. Other infinities are normal: a best loss starts as infinity, and a
    gradient norm may be infinite while a loss is scaled.
    """
    for name, value in plain_values.items():
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
    """Convert a user function's result for JSON: numbers and nested data stay, everything else becomes text."""
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
