"""Random state as tensors and numbers, for checkpoints without pickle. Only valid on the same type of device."""

import random
import sys
from typing import Any

import torch


def capture_host() -> dict[str, Any]:
    """State of Python's, NumPy's (if imported) and torch's CPU generators."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = {
            "kind": str(kind),
            "words": torch.tensor(keys.astype("int64")),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    return state


def restore_host(state: dict[str, Any]) -> None:
    """Restore a state from `capture_host`."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    numpy_state, numpy = state.get("numpy"), sys.modules.get("numpy")
    if numpy_state is not None and numpy is not None:
        words = numpy.asarray(numpy_state["words"].tolist(), dtype="uint32")
        numpy.random.set_state(
            (numpy_state["kind"], words, numpy_state["position"], numpy_state["has_gauss"], numpy_state["cached"])
        )


def seed_host(number: int) -> None:
    """Seed Python, NumPy (if imported) and torch on every device type that torch supports itself."""
    random.seed(number)
    torch.manual_seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)
