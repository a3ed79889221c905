"""Numbers that callers give."""

import math
from typing import Any

from cluster.errors import UserError


def number(name: str, value: Any, least: float = -math.inf) -> float:
    """A finite number of at least `least`. Raises UserError."""
    try:
        given = float(value)
    except (TypeError, ValueError):
        given = math.nan
    if not math.isfinite(given) or given < least:
        raise UserError(
            f"{name} is {value!r}", f"give a finite number{f' of at least {least:g}' if least > -math.inf else ''}"
        )
    return given


def count(name: str, value: Any) -> int:
    """A whole number of at least 0. Raises UserError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{name} is {value!r}", "give a whole number of at least 0")
    return value
