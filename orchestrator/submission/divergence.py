"""Find where two machines diverge: the first layer, gradient and step that differ by more than rounding."""

import math
from typing import Any

RTOL = {"float64": 1e-7, "float32": 1.3e-6, "bfloat16": 1.6e-2, "float16": 1e-3}
"""Tolerances of torch.testing.assert_close."""
SAFETY = 8.0
Data = dict[str, Any]


def compare(one: Data, other: Data, precision: str, rtol: float = 0.0) -> Data:
    """Return {"comparable", "reason", "layers", "gradients", "steps": rows, "first": {"layer", "gradient", "step"}}.

    In a row, `difference` is the root mean square of the differences of all values (from sketches, within about 9 %),
    relative to that of the values, and `limit` its limit: the argument `rtol`, or 8 · rtol · √(layers so far).
    """
    for key, what in (("weights_sha256", "weights"), ("inputs_sha256", "inputs")):
        if one[key] != other[key]:
            return {"comparable": False, "reason": f"not comparable: the {what} differ", "layers": [], "gradients": [],
                    "steps": [], "first": {}}  # fmt: skip
    base = RTOL[precision]

    def limit(depth: int) -> float:
        return rtol or SAFETY * base * math.sqrt(depth)

    layers = [_row(a, b, limit(n)) for n, (a, b) in enumerate(zip(one["layers"], other["layers"], strict=False), 1)]
    depth = 2 * max(len(layers), 1)
    gradients = [_row(a, b, limit(depth)) for a, b in zip(one["gradients"], other["gradients"], strict=False)]
    steps = [_step(n, a, b, limit(depth * (n + 1)))
             for n, (a, b) in enumerate(zip(one["losses"], other["losses"], strict=False))]  # fmt: skip
    same_layers = [a["name"] for a in one["layers"]] == [b["name"] for b in other["layers"]]
    return {
        "comparable": same_layers,
        "reason": "" if same_layers else "not comparable: the models run different layers",
        "layers": layers, "gradients": gradients, "steps": steps,
        "first": {"layer": _first(layers), "gradient": _first(gradients), "step": _first(steps)},
    }  # fmt: skip


def same(compared: Data) -> bool:
    """Return whether nothing differs by more than rounding."""
    return bool(compared["comparable"]) and not any(compared["first"].values())


def _row(a: Data, b: Data, limit: float) -> Data:
    if a["shape"] != b["shape"] or a["not_finite"] != b["not_finite"]:
        differing = "shapes" if a["shape"] != b["shape"] else "numbers of NaN and infinities"
        return {"name": a["name"], "difference": None, "limit": limit, "ok": False, "note": f"the {differing} differ"}
    if a["sha256"] == b["sha256"]:
        return {"name": a["name"], "difference": 0.0, "limit": limit, "ok": True, "note": "bit for bit"}
    distance = math.dist(a["sketch"], b["sketch"]) / math.sqrt(math.prod(a["shape"]))
    difference = distance / (max(a["rms"], b["rms"]) or 1.0)
    return {"name": a["name"], "difference": difference, "limit": limit, "ok": difference <= limit, "note": ""}


def _step(number: int, a: float, b: float, limit: float) -> Data:
    one, other = float(a), float(b)
    difference = abs(one - other) / max(abs(one), abs(other), 1e-30)
    return {
        "name": f"step {number}",
        "difference": difference,
        "limit": limit,
        "ok": difference <= limit,
        "note": f"{one:.6g}, {other:.6g}",
    }


def _first(rows: list[Data]) -> str:
    return next((str(row["name"]) for row in rows if not row["ok"]), "")
