"""Values of others' files become entries: a state dict is a module, that of an optimizer an optimizer."""

import os
from pathlib import Path
from typing import Any

from workers.checkpoint.exchange.imported_state import ImportedState, is_extra_state
from workers.checkpoint.exchange.legacy_archive import LegacyArchive, is_legacy
from workers.checkpoint.exchange.optimizer_state import is_optimizer, optimizers_in
from workers.checkpoint.exchange.pickle_values import PickleDecoder
from workers.checkpoint.exchange.tensors import ForeignTensor
from workers.checkpoint.exchange.torch_archive import Archive
from workers.checkpoint.format.manifest_checks import open_regular

_SHORT = {
    "state_dict": "model", "model_state_dict": "model",
    "optimizer_state_dict": "optimizer", "optimizer_states": "optimizer",
}  # fmt: skip
"""What Lightning and torch's own tutorials call them."""
_USUAL = {*_SHORT, "model", "optim", "optimizer"}
"""Names that say enough by themselves."""


def read_value(path: Path, plain: PickleDecoder) -> Any:
    """Of a file of torch.save."""
    with os.fdopen(open_regular(path), "rb") as file:
        legacy = is_legacy(file.read(16))
    archive = LegacyArchive(path) if legacy else Archive(path)
    plain.allow(str(path), archive.pickle_bytes)
    return plain.value(archive.value, path.name)


def take(found: ImportedState, value: Any) -> None:
    """A state dict is a module, that of an optimizer an optimizer; of a dict of such things each is an entry."""
    if is_state_dict(value):
        found.module("model", value)
        return
    if is_optimizer(value):
        found.optimizer("optimizer", value)
        return
    if not isinstance(value, dict):
        found.plain("value", value)
        return
    rest = {}
    for key, item in value.items():
        if isinstance(key, str) and is_state_dict(item):
            found.module(found.name_free(_SHORT.get(key, key)), item)
        elif isinstance(key, str) and take_optimizers(found, _SHORT.get(key, key), item):
            continue
        elif isinstance(key, str) and isinstance(item, dict | list):
            _take_nested(found, key, item)
        else:
            rest[key] = item
    if rest:
        found.plain(found.name_free("extra"), rest)


def _take_nested(found: ImportedState, name: str, value: Any) -> None:
    """Models and optimizers in a dict within the file's are entries, too, as in torch's own {"app": {"model", "optim"}}
    and a GAN's {"nets": {"g", "d"}}."""
    inner = value if isinstance(value, dict) else {}
    parts = {key: item for key, item in inner.items() if isinstance(key, str) and _is_part(item)}
    for key, item in parts.items():
        entry = found.name_free(_SHORT.get(key, key) if key in _USUAL else f"{name}.{key}")
        if is_optimizer(item):
            found.optimizer(entry, item)
        else:
            found.module(entry, item)
    rest = {key: item for key, item in inner.items() if key not in parts} if parts else value
    if rest or not parts:
        found.plain(found.name_free(name), rest)


def _is_part(value: Any) -> bool:
    return is_optimizer(value) or is_state_dict(value)


def take_optimizers(found: ImportedState, name: str, value: Any) -> bool:
    """Whether `value` was one, or several and nothing else; the latter become `name.0`, `name.1`, …"""
    if is_optimizer(value):
        found.optimizer(found.name_free(name), value)
        return True
    several = optimizers_in(value)
    for key, one in several.items():
        found.optimizer(found.name_free(name if len(several) == 1 else f"{name}.{key}"), one)
    return bool(several)


def is_state_dict(value: Any) -> bool:
    """Whether it is a model's: tensors by name, perhaps beside what modules gave in `get_extra_state`."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return False
    tensors = [item for key, item in value.items() if not is_extra_state(key)]
    return bool(tensors) and all(isinstance(item, ForeignTensor) for item in tensors)
