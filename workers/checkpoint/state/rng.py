"""Save and restore random state: exactly on the same device type, else with a derived seed.

A stream cannot be converted to another device type: XLA keeps one integer, CUDA a seed and an offset, the CPU 5056
bytes. It is then seeded from (seed, rank, step, device type), and the load report says so.
"""

import hashlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from workers.checkpoint.format.manifest import DamagedCheckpoint
from workers.checkpoint.tensors import xla

CONTINUED = "continued"


def capture_rng(device_types: Iterable[str]) -> dict[str, Any]:
    """Capture the random state of Python, numpy, and torch on the CPU and each of the device types."""
    version, words, gauss = random.getstate()
    return {
        "seed": torch.initial_seed(),
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "torch": {device_type: _get(device_type) for device_type in sorted({"cpu", *device_types})},
    }


def restore_rng(saved: dict[str, Any], step: int, device_types: Iterable[str], rank: int = 0) -> dict[str, str]:
    """Set all streams; return `continued` or `derived: reason` per stream."""
    random.setstate(_python_state(saved))
    np.random.set_state(saved["numpy"])
    outcomes = {"python": CONTINUED, "numpy": CONTINUED}
    for device_type in sorted({"cpu", *device_types}):
        outcomes[device_type] = _continue_or_derive(saved, step, rank, device_type)
    return outcomes


def check_restorable(saved: Any) -> None:
    """Try the host's streams on temporary generators, so that a restore cannot fail after some streams were set."""
    try:
        random.Random().setstate(_python_state(saved))  # noqa: S311
        np.random.RandomState().set_state(saved["numpy"])
        if type(saved["seed"]) is not int or not isinstance(saved["torch"], dict):
            raise TypeError("seed and torch are an integer and a dict")
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise DamagedCheckpoint(f"the random state in the manifest is malformed: {e!r}") from None


def derived_seed(seed: int, rank: int, step: int, device_type: str) -> int:
    """Seed for a new device type or number of ranks, where no state fits. The same inputs give the same seed."""
    digest = hashlib.sha256(f"{seed}:{rank}:{step}:{device_type}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


def _python_state(saved: dict[str, Any]) -> tuple[Any, ...]:
    python = saved["python"]
    return python["version"], tuple(int(number) for number in python["words"]), python["gauss"]


def _continue_or_derive(saved: dict[str, Any], step: int, rank: int, device_type: str) -> str:
    state = saved["torch"].get(device_type)
    if state is not None and _same_form(state, _get(device_type)):
        _set(device_type, state)
        return CONTINUED
    _seed(device_type, derived_seed(saved["seed"], rank, step, device_type))
    reason = (
        f"saved on {', '.join(sorted(saved['torch']))}"
        if state is None
        else "this torch keeps its state in another form"
    )
    return f"derived from (seed, rank, step, device type): {reason}"


def _same_form(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype
    return type(a) is type(b)


def _generator(device_type: str) -> Any:
    return torch if device_type == "cpu" else getattr(torch, device_type)


def _get(device_type: str) -> Any:
    return xla.get_rng_state() if device_type == "xla" else _generator(device_type).get_rng_state()


def _set(device_type: str, state: Any) -> None:
    if device_type == "xla":
        xla.set_rng_state(state)
    else:
        _generator(device_type).set_rng_state(state)


def _seed(device_type: str, seed: int) -> None:
    if device_type == "xla":
        xla.set_rng_state(seed)
    elif device_type == "cpu":
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every device
    else:
        _generator(device_type).manual_seed(seed)
