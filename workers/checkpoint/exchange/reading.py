"""The formats of others, each told apart by what lies there and read into a Found."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.errors import NotFound, PolyfleetError, UserError, nearest
from workers.checkpoint.exchange.archive import Archive
from workers.checkpoint.exchange.dcp_folders import read_dcp
from workers.checkpoint.exchange.found import Found
from workers.checkpoint.exchange.naming import place_optimizers
from workers.checkpoint.exchange.optimizers import is_optimizer, optimizers_in
from workers.checkpoint.exchange.safetensors_files import Held, files_of, read_header
from workers.checkpoint.exchange.values import Parts, Plain, Reference, Storage
from workers.checkpoint.format.checks import open_regular
from workers.checkpoint.format.dtypes import DTYPES
from workers.errors import CheckpointError

FORMATS = ("safetensors", "torch", "dcp", "accelerate")
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
RANDOM_STATES = "random_states_0.pkl"
_SHORT = {
    "state_dict": "model", "model_state_dict": "model",
    "optimizer_state_dict": "optimizer", "optimizer_states": "optimizer",
}  # fmt: skip
"""What Lightning and torch's own tutorials call them."""


def format_of(source: Path) -> str:
    """By what is there. Raises NotFound, CheckpointError."""
    if not source.exists():
        raise NotFound(f"there is nothing at {source}", "name a file or a folder")
    if source.is_dir():
        if os.path.lexists(source / ".metadata"):
            return "dcp"
        if any(os.path.lexists(source / name) for name in ("optimizer.bin", RANDOM_STATES)):
            return "accelerate"
        if files_of(source):
            return "safetensors"
        raise CheckpointError(f"{source} holds nothing that can be imported", f"known: {', '.join(FORMATS)}")
    if source.suffix == ".safetensors":
        return "safetensors"
    with os.fdopen(open_regular(source), "rb") as file:
        head = file.read(4)
    if head[:2] == b"PK" or source.suffix in SUFFIXES:
        return "torch"
    raise CheckpointError(f"{source} is of no known format", f"known: {', '.join(FORMATS)}")


def read(source: Path, format: str, drop: bool) -> Found:  # noqa: A002
    """Everything in `source`. Objects that are no plain values are refused, or with `drop` left out and noted."""
    known: dict[str, Callable[[Path], tuple[Found, Plain]]] = {
        "safetensors": _safetensors, "torch": _torch, "dcp": _dcp, "accelerate": _accelerate,
    }  # fmt: skip
    if format not in known:
        raise UserError(f"format is {format!r}", nearest(format, FORMATS))
    try:
        return _sound(source, *known[format](source), drop)
    except PolyfleetError:
        raise
    except (MemoryError, RecursionError) as e:
        said = (
            "needs much more memory than files of its size do" if isinstance(e, MemoryError) else "is nested too deep"
        )
        raise CheckpointError(f"{source} {said}", "is it what it claims to be?") from None
    except Exception as e:  # a stranger's file may be wrong in any way
        raise CheckpointError(
            f"{source} cannot be understood: {type(e).__name__}: {e!s:.200}", "is the file complete?"
        ) from e


def _sound(source: Path, found: Found, plain: Plain, drop: bool) -> Found:
    """`found`, with its optimizers and ties, once nothing in it is refused."""
    if plain.refused and not drop:
        where, what = next(iter(plain.refused.items()))
        raise CheckpointError(
            f"{source} holds {len(plain.refused)} objects that are no plain values; {where} is a {what}",
            "pass --drop to leave them out; tensors and numbers are kept",
        )
    found.notes += [f"dropped {where}: a {what}" for where, what in plain.refused.items()]
    found.tie()
    place_optimizers(found)
    found.tie()  # what optimizers hold, too
    _judge_unfit(source, found, drop)
    if not found.entries:
        raise CheckpointError(f"{source} holds no tensors and no values", "is it the right file?")
    return found


def _judge_unfit(source: Path, found: Found, drop: bool) -> None:
    """Raises CheckpointError for what looks like the state of an optimizer and cannot be one, unless it is dropped."""
    for entry, why in found.unfit.items():
        if not drop:
            raise CheckpointError(
                f"{source}: {entry} looks like the state of an optimizer, but it {why}",
                "pass --drop to leave it out; the rest is kept",
            )
        found.notes.append(f"dropped {entry}, the state of an optimizer that {why}")


def _safetensors(source: Path) -> tuple[Found, Plain]:
    found, tensors = Found(ordered=False), {}  # safetensors sorts its headers
    for path in files_of(source):
        size_bytes, held = read_header(path)
        for name, one in held.items():
            if name in tensors:
                raise CheckpointError(f"{path} holds {name}, which another file of {source} holds, too", "keep one")
            tensors[name] = _reference(path, name, one, size_bytes)
    found.module("model", tensors)
    return found, Plain()


def _reference(path: Path, name: str, held: Held, size_bytes: int) -> Reference:
    """A tensor by itself in a file: two that claim the same bytes are no tie there, but a lie."""
    strides: list[int] = []
    count = 1
    for n in reversed(held.shape):
        strides.insert(0, count)
        count *= n
    there = Storage(str(path), held.offset, count * DTYPES[held.dtype].bytes, held.dtype, "cpu", f"{path}:{name}")
    if held.offset + there.bytes > size_bytes:
        raise CheckpointError(f"{path} is cut off: it has {size_bytes} bytes", "copy it again from its source")
    return Reference(there, held.dtype, 0, held.shape, tuple(strides))


def _torch(source: Path) -> tuple[Found, Plain]:
    found, plain = Found(), Plain()
    value = _value(source, plain)
    _take(found, value)
    if isinstance(value, dict):
        step = value.get("global_step", value.get("step", 0))
        found.step = step if type(step) is int and step >= 0 else 0
    return found, plain


def _value(path: Path, plain: Plain) -> Any:
    archive = Archive(path)
    plain.allow(str(path), archive.pickle_bytes)
    return plain.value(archive.value, path.name)


def _take(found: Found, value: Any) -> None:
    """A state dict is a module, that of an optimizer an optimizer; of a dict of such things each is an entry."""
    if _is_state_dict(value):
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
        if isinstance(key, str) and _is_state_dict(item):
            found.module(found.name_free(_SHORT.get(key, key)), item)
        elif isinstance(key, str) and _take_optimizers(found, _SHORT.get(key, key), item):
            continue
        elif isinstance(key, str) and isinstance(item, dict | list):
            found.plain(found.name_free(key), item)
        else:
            rest[key] = item
    if rest:
        found.plain(found.name_free("extra"), rest)


def _take_optimizers(found: Found, name: str, value: Any) -> bool:
    """Whether `value` was one, or several and nothing else; the latter become `name.0`, `name.1`, …"""
    if is_optimizer(value):
        found.optimizer(found.name_free(name), value)
        return True
    several = optimizers_in(value)
    for key, one in several.items():
        found.optimizer(found.name_free(name if len(several) == 1 else f"{name}.{key}"), one)
    return bool(several)


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(k, str) and isinstance(v, Reference | Parts) for k, v in value.items())
    )


def _accelerate(source: Path) -> tuple[Found, Plain]:
    """A folder of save_state: the model, and what else it saved. All that belongs together, or an error."""
    models = [p for p in (source / "model.safetensors", source / "pytorch_model.bin") if p.is_file()]
    models = models or files_of(source)
    missing = [name for name in ("optimizer.bin", RANDOM_STATES) if not os.path.lexists(source / name)]
    if not models or missing:
        raise CheckpointError(
            f"{source} is half a state: {', '.join(missing) or 'the model'} is missing",
            "import the model's file alone, or copy the folder again from its source",
        )
    found, plain = _safetensors(source) if models[0].suffix == ".safetensors" else _torch(models[0])
    for path in sorted((*source.glob("*.bin"), *source.glob("*.pkl"), *source.glob("*.pt"))):
        if path not in models:
            value = _value(path, plain)
            if not _take_optimizers(found, path.stem, value):
                found.plain(found.name_free(path.stem), value)
    return found, plain


def _dcp(source: Path) -> tuple[Found, Plain]:
    found, plain = Found(ordered=False), Plain()
    _take(found, read_dcp(source, plain))
    return found, plain
