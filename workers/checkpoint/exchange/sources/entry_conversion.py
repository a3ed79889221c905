"""Turn values of imported files into entries: state dicts become modules and optimizers."""

import os
from pathlib import Path
from typing import Any

from workers.checkpoint.exchange.pickles.legacy_archive import LegacyArchive, is_legacy
from workers.checkpoint.exchange.pickles.pickle_values import PickleDecoder
from workers.checkpoint.exchange.pickles.tensors import ForeignTensor
from workers.checkpoint.exchange.pickles.torch_archive import Archive
from workers.checkpoint.exchange.sources.imported_state import ImportedState, is_extra_state
from workers.checkpoint.exchange.sources.optimizer_state import is_optimizer, optimizers_in
from workers.checkpoint.format.manifest_checks import open_regular

_ENTRY_NAMES = {
    "state_dict": "model", "model_state_dict": "model",
    "optimizer_state_dict": "optimizer", "optimizer_states": "optimizer",
}  # fmt: skip
"""Names that Lightning and torch's own tutorials use, and ours."""
_PLAIN_NAMES = {*_ENTRY_NAMES, "model", "optim", "optimizer"}
"""Names that are used as entry names without a prefix."""


def read_value(path: Path, plain: PickleDecoder) -> Any:
    """Read a file of torch.save."""
    with os.fdopen(open_regular(path), "rb") as file:
        legacy = is_legacy(file.read(16))
    archive = LegacyArchive(path) if legacy else Archive(path)
    plain.allow(str(path), archive.pickle_bytes)
    return plain.value(archive.value, path.name)


def add_entries(state: ImportedState, value: Any) -> None:
    """Add a value's entries to `state`: a module, an optimizer, or each such item of a dict as an entry."""
    if is_state_dict(value):
        state.module("model", value)
        return
    if is_optimizer(value):
        state.optimizer("optimizer", value)
        return
    if not isinstance(value, dict):
        state.plain("value", value)
        return
    rest = {}
    for key, item in value.items():
        if isinstance(key, str) and is_state_dict(item):
            state.module(state.free_name(_ENTRY_NAMES.get(key, key)), item)
        elif isinstance(key, str) and add_optimizer_entries(state, _ENTRY_NAMES.get(key, key), item):
            continue
        elif isinstance(key, str) and isinstance(item, dict | list):
            _add_nested(state, key, item)
        else:
            rest[key] = item
    if rest:
        state.plain(state.free_name("extra"), rest)


def _add_nested(state: ImportedState, name: str, value: Any) -> None:
    """Add models and optimizers in an inner dict as entries.
    Examples: {"app": {"model", "optim"}} of torch's tutorial and {"nets": {"g", "d"}} of a GAN.
    """
    inner = value if isinstance(value, dict) else {}
    parts = {key: item for key, item in inner.items() if isinstance(key, str) and _is_part(item)}
    for key, item in parts.items():
        entry = state.free_name(_ENTRY_NAMES.get(key, key) if key in _PLAIN_NAMES else f"{name}.{key}")
        if is_optimizer(item):
            state.optimizer(entry, item)
        else:
            state.module(entry, item)
    rest = {key: item for key, item in inner.items() if key not in parts} if parts else value
    if rest or not parts:
        state.plain(state.free_name(name), rest)


def _is_part(value: Any) -> bool:
    return is_optimizer(value) or is_state_dict(value)


def add_optimizer_entries(state: ImportedState, name: str, value: Any) -> bool:
    """Add `value` if it is one optimizer, or several and nothing else; return whether it was.
    Several become `name.0`, `name.1`, …
    """
    if is_optimizer(value):
        state.optimizer(state.free_name(name), value)
        return True
    optimizers = optimizers_in(value)
    for key, optimizer in optimizers.items():
        state.optimizer(state.free_name(name if len(optimizers) == 1 else f"{name}.{key}"), optimizer)
    return bool(optimizers)


def is_state_dict(value: Any) -> bool:
    """Check for a model's state dict: tensors by name, and possibly results of `get_extra_state`."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return False
    tensors = [item for key, item in value.items() if not is_extra_state(key)]
    return bool(tensors) and all(isinstance(item, ForeignTensor) for item in tensors)
