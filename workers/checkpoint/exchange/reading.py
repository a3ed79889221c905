"""The formats of others, each told apart by what lies there and read into a Found."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.errors import NotFound, UserError, nearest
from workers.checkpoint.exchange import symbols
from workers.checkpoint.exchange.archive import Archive
from workers.checkpoint.exchange.found import Found
from workers.checkpoint.exchange.safetensors_files import Held, files_of, read_header
from workers.checkpoint.exchange.symbols import Call
from workers.checkpoint.exchange.values import Parts, Plain, Reference, Storage
from workers.checkpoint.format.checks import open_regular
from workers.checkpoint.format.dtypes import DTYPES
from workers.errors import CheckpointError

FORMATS = ("safetensors", "torch", "dcp", "accelerate")
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
RANDOM_STATES = "random_states_0.pkl"


def format_of(source: Path) -> str:
    """By what is there. Raises NotFound, CheckpointError."""
    if not source.exists():
        raise NotFound(f"there is nothing at {source}", "name a file or a folder")
    if source.is_dir():
        if (source / ".metadata").is_file():
            return "dcp"
        if any((source / name).is_file() for name in ("optimizer.bin", RANDOM_STATES)):
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
    found, plain = known[format](source)
    if plain.refused and not drop:
        where, what = next(iter(plain.refused.items()))
        raise CheckpointError(
            f"{source} holds {len(plain.refused)} objects that are no plain values; {where} is a {what}",
            "pass --drop to leave them out; tensors and numbers are kept",
        )
    found.notes += [f"dropped {where}: a {what}" for where, what in plain.refused.items()]
    found.tie()
    if not found.entries:
        raise CheckpointError(f"{source} holds no tensors and no values", "is it the right file?")
    return found


def _safetensors(source: Path) -> tuple[Found, Plain]:
    found, tensors = Found(), {}
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
    value = plain.value(Archive(source).value, source.name)
    _take(found, value)
    if isinstance(value, dict):
        step = value.get("global_step", value.get("step", 0))
        found.step = step if type(step) is int and step >= 0 else 0
    return found, plain


def _take(found: Found, value: Any) -> None:
    """A state dict is a module; of a dict of such things each is an entry; Lightning's `state_dict` is the model."""
    if _is_state_dict(value):
        found.module("model", value)
        return
    if not isinstance(value, dict):
        found.plain("value", value)
        return
    rest = {}
    for key, item in value.items():
        if isinstance(key, str) and _is_state_dict(item):
            found.module(found.name_free("model" if key in ("state_dict", "model_state_dict") else key), item)
        elif isinstance(key, str) and isinstance(item, dict | list):
            found.plain(found.name_free(key), item)
        else:
            rest[key] = item
    if rest:
        found.plain(found.name_free("extra"), rest)


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
    missing = [name for name in ("optimizer.bin", RANDOM_STATES) if not (source / name).is_file()]
    if not models or missing:
        raise CheckpointError(
            f"{source} is half a state: {', '.join(missing) or 'the model'} is missing",
            "import the model's file alone, or copy the folder again from its source",
        )
    found, plain = _safetensors(source) if models[0].suffix == ".safetensors" else _torch(models[0])
    for path in sorted((*source.glob("*.bin"), *source.glob("*.pkl"), *source.glob("*.pt"))):
        if path not in models:
            found.plain(found.name_free(path.stem), plain.value(Archive(path).value, path.name))
    return found, plain


def _dcp(source: Path) -> tuple[Found, Plain]:
    """A folder of torch.distributed.checkpoint: `.metadata` is a pickle, and so is the head of every tensor."""
    found, plain = Found(), Plain()
    metadata = symbols.read((source / ".metadata").read_bytes(), str(source / ".metadata"))
    try:
        places = {_index(key): _place(source, value) for key, value in metadata.state["storage_data"].items()}
        described = metadata.state["state_dict_metadata"]
        paths = metadata.state.get("planner_data") or {}
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{source / '.metadata'} is no metadata of DCP: {e!r}", "is it complete?") from None
    nested: dict[Any, Any] = {}
    for fqn, meta in described.items():
        parts = {offset: place for (name, offset), place in places.items() if name == fqn}
        if meta.what.endswith("BytesStorageMetadata"):
            value = plain.value(_blob(next(iter(parts.values()))), fqn)
        else:
            value = _joined(fqn, meta, {offset: plain.value(_blob(p), fqn) for offset, p in parts.items()})
        _put(nested, tuple(paths.get(fqn, (fqn,))), value)
    _take(found, _listed(nested))
    return found, plain


def _index(key: Any) -> tuple[str, tuple[int, ...]]:
    offset = key.state.get("offset")
    return key.state["fqn"], tuple(offset.arguments[0]) if offset is not None else ()


def _place(source: Path, value: Call) -> tuple[Path, int, int]:
    told = value.state
    name = told["relative_path"]
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{source / '.metadata'} names the file {name!r}", "files of DCP lie beside it")
    if told.get("transform_descriptors"):
        raise CheckpointError(f"{source} is compressed or encrypted", "save it without extensions")
    return source / name, int(told["offset"]), int(told["length"])


def _blob(place: tuple[Path, int, int]) -> Any:
    return Archive(*place).value


def _joined(fqn: str, meta: Call, parts: dict[tuple[int, ...], Any]) -> Any:
    """A tensor; one that ranks have cut stays in its parts, which the importer writes as shards of one."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    return Parts(tuple(meta.state["size"].arguments[0]), {k: v for k, v in parts.items() if isinstance(v, Reference)})


def _put(tree: dict[Any, Any], path: tuple[Any, ...], leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _listed(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    items = {key: _listed(value) for key, value in tree.items()}
    if items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items))):
        return [items[i] for i in sorted(items)]
    return items
