"""Data to JSON text and back. A loss may be NaN, JSON may not: such numbers become the strings "NaN" and "Infinity"."""

import json
import math
from typing import Any

from pydantic_core import from_json

from cluster.errors import UserError

JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def encode(data: dict[str, Any]) -> str:
    """Raises UserError for what is not plain data."""
    try:
        try:
            return JSON.encode(data)
        except ValueError:
            return JSON.encode(_finite(data))
    except (TypeError, ValueError, RecursionError) as e:
        raise UserError(f"not plain data: {e}", "use dicts with text keys, lists, text and numbers only") from None


def decode(text: str) -> dict[str, Any]:
    """By pydantic's reader, in half the time; Python's also takes half of a surrogate pair, and many levels."""
    try:
        data: dict[str, Any] = from_json(text)
    except ValueError:
        data = json.loads(text)
    return data


def _finite(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return "NaN" if math.isnan(data) else "Infinity" if data > 0 else "-Infinity"
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data
