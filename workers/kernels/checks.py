"""Check numbers that callers pass."""

import math
from typing import Any

from cluster.errors import UserError


def number(name: str, value: Any, least: float = -math.inf) -> float:
    """Return a finite number of at least `least`. Raises UserError."""
    try:
        converted = float(value)
    except (TypeError, ValueError):
        converted = math.nan
    if not math.isfinite(converted) or converted < least:
        raise UserError(
            f"{name} is {value!r}", f"write a finite number{f' of at least {least:g}' if least > -math.inf else ''}"
        )
    return converted


def count(name: str, value: Any) -> int:
    """Return an integer of at least 0. Raises UserError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{name} is {value!r}", "write an integer of at least 0")
    return value
