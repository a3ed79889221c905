"""Data to JSON text and back. A loss may be NaN, JSON may not: such numbers become the strings "NaN" and "Infinity"."""

import json
import math
from typing import Any

from cluster.errors import UserError


def encode(data: dict[str, Any]) -> str:
    """Raises UserError for what is not plain data."""
    try:
        try:
            return json.dumps(data, allow_nan=False, separators=(",", ":"))
        except ValueError:
            return json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as e:
        raise UserError(f"not plain data: {e}", "use dicts with text keys, lists, text and numbers only") from None


def decode(text: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(text)
    return data


def _finite(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return "NaN" if math.isnan(data) else "Infinity" if data > 0 else "-Infinity"
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data
