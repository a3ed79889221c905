"""Random state as tensors and numbers, for checkpoints without pickle. Only valid on the same type of device.

Users call the functions over a back end as methods: see user_methods.py.
"""

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from cluster.errors import UserError
from workers.devices.backends.user_methods import overridable

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend


@overridable
def seed(backend: "BaseBackend", number: int) -> None:
    """Seed Python, NumPy, torch and the device."""
    seed_host(number)
    backend._seed_device(number)


@overridable
def rng_type(backend: "BaseBackend") -> str:
    """Type of random states, which can be moved between all devices of the same type."""
    return backend._rng_type()


@overridable
def rng_state(backend: "BaseBackend") -> dict[str, Any]:
    """State of every generator, as tensors and numbers. Only the same type of device can restore it."""
    return {"device_type": backend._rng_type(), "device": backend._device_rng(), "host": capture_host()}


@overridable
def accepts_rng_state(backend: "BaseBackend", state: dict[str, Any]) -> bool:
    return bool(state["device_type"] == rng_type(backend))


@overridable
def set_rng_state(backend: "BaseBackend", state: dict[str, Any]) -> None:
    """Restore a state from `rng_state`. Raises UserError for the state of another type of device."""
    if not accepts_rng_state(backend, state):
        raise UserError(
            f"random state of {state['device_type']} cannot be set on {backend._rng_type()}",
            "call seed() instead; workers.checkpoint.state.rng.derived_seed computes a seed",
        )
    restore_host(state["host"])
    backend._set_device_rng(state["device"])


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
