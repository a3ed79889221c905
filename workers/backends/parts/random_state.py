"""Random state as tensors and numbers, for checkpoints without pickle. It is exact between devices of one type only."""

import hashlib
import random
import sys
from typing import Any

import torch


def capture_host() -> dict[str, Any]:
    """State of Python's, NumPy's (where it is imported) and torch's CPU generators."""
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
    """Undo to what `capture_host` returned."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    saved, numpy = state.get("numpy"), sys.modules.get("numpy")
    if saved is not None and numpy is not None:
        words = numpy.asarray(saved["words"].tolist(), dtype="uint32")
        numpy.random.set_state((saved["kind"], words, saved["position"], saved["has_gauss"], saved["cached"]))


def seed_host(number: int) -> None:
    """Seed Python, NumPy (where it is imported) and torch on every device type torch itself knows."""
    random.seed(number)
    torch.manual_seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)


def derived_seed(seed: int, rank: int, step: int, device_type: str) -> int:
    """Where a state cannot follow (another device type or number of ranks): the same four inputs give the same seed."""
    digest = hashlib.sha256(f"{seed}:{rank}:{step}:{device_type}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2
