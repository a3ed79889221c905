"""How a case of a benchmark was run, in words."""

from typing import Any


def way_of(cell: dict[str, Any]) -> str:
    """`fp32 O1 cold by triton`."""
    cold = " cold" if cell["regime"] == "cold" else ""
    kernels = f" by {cell['kernels']}" if cell.get("kernels") else ""
    return f"{cell['precision']} {cell['level']}{cold}{kernels}"
