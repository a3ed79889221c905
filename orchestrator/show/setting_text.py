"""Settings of a benchmark result as text."""

from typing import Any


def settings_text(result: dict[str, Any]) -> str:
    """Format settings as `fp32 O1 cold by triton`."""
    cold = " cold" if result["regime"] == "cold" else ""
    kernels = f" by {result['kernels']}" if result.get("kernels") else ""
    return f"{result['precision']} {result['level']}{cold}{kernels}"
