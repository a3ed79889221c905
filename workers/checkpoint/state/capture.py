"""Flatten a live state: named tensors on their devices, ties by identity, one JSON tree per entry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from workers.checkpoint.format import tree
from workers.checkpoint.format.dtypes import FP8, dtype_name
from workers.checkpoint.format.manifest import ENTRY, StateEntry, View
from workers.checkpoint.state import names, optimizer
from workers.checkpoint.state.rng import capture_rng
from workers.checkpoint.tensors import aliases
from workers.errors import CheckpointError


@dataclass(slots=True)
class Capture:
    """A flattened state. `tensors` are still on their devices.

    `ties`: name -> (stored name, role). `views`: name -> (stored name, how). `scales`: fp8 tensor -> the tensor that
    multiplies it. `_stored`: object id -> name.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    ties: dict[str, tuple[str, str]] = field(default_factory=dict)
    views: dict[str, tuple[str, View]] = field(default_factory=dict)
    scales: dict[str, str] = field(default_factory=dict)
    entries: dict[str, StateEntry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _stored: dict[int, str] = field(default_factory=dict)

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors to write: all but those that are views of another."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.views}

    def module(self, entry: str, module: nn.Module) -> None:
        for slot in names.slots(entry, module):
            stored = self._stored.get(id(slot.tensor))
            if stored:
                self.ties[slot.name] = (stored, slot.role)
            else:
                self._store(slot.name, slot.tensor, slot.role)
        extra = {prefix: submodule.get_extra_state() for prefix, submodule in names.extra_states(module).items()}
        self._entry(entry, "module", names.unwrap(module), {"extra_state": extra}, "tensor")

    def optimizer(self, entry: str, live: torch.optim.Optimizer) -> None:
        parameters = {id(t): name for name, t in self.tensors.items() if self.roles[name] == "parameter"}
        self._entry(entry, "optimizer", live, optimizer.describe(entry, live, parameters), "optimizer")

    def stateful(self, entry: str, live: Any) -> None:
        self._entry(entry, "stateful", live, live.state_dict(), "tensor")

    def rng(self, entry: str) -> None:
        device_types = {tensor.device.type for tensor in self.tensors.values()}
        self._entry(entry, "rng", None, capture_rng(device_types), "rng")

    def plain(self, entry: str, value: Any) -> None:
        self._entry(entry, "tree", None, value, "tensor")

    def _entry(self, entry: str, kind: str, live: object, value: Any, role: str) -> None:
        encoded = tree.encode(value, entry, lambda leaf, path: self._leaf(leaf, path, role))
        self.entries[entry] = StateEntry(kind, type(live).__name__ if live is not None else "", encoded)

    def _leaf(self, value: Any, path: str, role: str) -> Any:
        if isinstance(value, torch.Tensor):
            names.check_plain(path, value)
            if role == "optimizer" and "master" in path.rpartition("/")[2]:
                role = "master"
            return {"$tensor": self._stored.get(id(value)) or self._store(path, value, role)}
        if type(value) is np.ndarray and tree.is_portable(value.dtype):
            native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
            return {"$array": self._store(path, torch.from_numpy(native), "array" if role == "tensor" else role)}
        return tree.raise_unsupported(value, path)

    def _store(self, name: str, tensor: torch.Tensor, role: str) -> str:
        while name in self.tensors or name in self.ties:
            name += "~"  # {"a/b": x, "a": {"b": y}} gives the same path twice
        self.tensors[name], self.roles[name], self._stored[id(tensor)] = tensor, role, name
        return name


def capture(state: Mapping[str, Any]) -> Capture:
    """Flatten a state. Modules come first: optimizers refer to their parameters' names, and tensors are stored under a
    module's.
    """
    for entry in state:
        if not isinstance(entry, str) or not ENTRY.fullmatch(entry):
            raise CheckpointError(
                f"entry {entry!r} of the state", "name entries with letters, digits, '_', '-' and '.'"
            )
    captured = Capture()
    for entry in sorted(state, key=lambda name: kind_of(name, state[name]) != "module"):
        value = state[entry]
        match kind_of(entry, value):
            case "module":
                captured.module(entry, value)
            case "optimizer":
                captured.optimizer(entry, value)
            case "stateful":
                captured.stateful(entry, value)
            case "rng":
                captured.rng(entry)
            case _:
                captured.plain(entry, value)
    captured.views, captured.notes = aliases.find_views(captured.tensors)
    captured.scales = {name: scale for name in captured.tensors if (scale := _scale_of(name, captured.tensors))}
    return captured


def _scale_of(name: str, tensors: dict[str, torch.Tensor]) -> str:
    """Find the scale of an fp8 weight by the names that vLLM, compressed-tensors and DeepSeek use."""
    if dtype_name(tensors[name].dtype) not in FP8:
        return ""
    return next((name + ending for ending in ("_scale", "_scale_inv") if name + ending in tensors), "")


def kind_of(entry: str, value: Any) -> str:
    """Return the kind (see manifest.KINDS) of an entry of a live state."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return "stateful"
    return "rng" if entry == "rng" and value is True else "tree"
