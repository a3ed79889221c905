"""What an importer found, whatever it came from: entries whose tensors still lie in files of others."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from workers.checkpoint.disk.layout import Piece
from workers.checkpoint.exchange.optimizers import NoOptimizerError, Told, read_state_dict, why_plain
from workers.checkpoint.exchange.values import Parts, Reference
from workers.checkpoint.format import tree
from workers.checkpoint.format.checks import open_regular
from workers.checkpoint.format.dtypes import DTYPES, dtype_name
from workers.checkpoint.format.manifest import ENTRY, DamagedCheckpoint, Entry, Stored, TensorEntry, View
from workers.checkpoint.format.optimizer_tree import Key
from workers.errors import CheckpointError


@dataclass(slots=True)
class Found:
    """`tensors` are described without a place. `references` say where their bytes are now. `unfit` says of entries
    that look like an optimizer's state why they are none. `ordered`: tensors come in the order their model has."""

    step: int = 0
    ordered: bool = True
    entries: dict[str, Entry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    references: dict[str, "Reference | Parts | np.ndarray[Any, Any]"] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    optimizers: dict[str, Told] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    _named: dict[int, str] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    def module(self, entry: str, tensors: dict[str, Any]) -> None:
        """A state dict: names and tensors only."""
        for name, tensor in tensors.items():
            self._tensor(f"{entry}/{name}", tensor, "parameter" if _is_float(tensor) else "buffer")
        self.entries[entry] = Entry("module", "", {"extra_state": {}})

    def plain(self, entry: str, value: Any) -> None:
        self.entries[entry] = Entry("tree", "", tree.encode(value, entry, self._leaf))

    def optimizer(self, entry: str, value: dict[str, Any]) -> None:
        """A state dict of torch.optim, put aside until the models are known that its parameters may belong to."""
        if why := why_plain(value):
            self.notes.append(f"{entry}: an optimizer's state that {why}; it stays plain values")
            self.plain(entry, value)
            return
        try:
            self.optimizers[entry] = read_state_dict(value)
        except NoOptimizerError as e:
            self.unfit[entry] = str(e)

    def place_optimizer(self, entry: str, told: Told, named: dict[Key, str], worked_out: dict[Key, str]) -> None:
        """Make an entry of one: by names where all are certain, else by numbers, beside names that were worked out."""
        groups = [
            {"parameters": [named.get(key, key) for key in group], "options": self._encoded(options, f"{entry}/{i}")}
            for i, (group, options) in enumerate(zip(told.groups, told.options, strict=True))
        ]
        keys = {key: str(named.get(key, key)) for key in told.state}
        state = {text: self._encoded(dict(told.state[key]), f"{entry}/state/{text}") for key, text in keys.items()}
        names = {"names": {str(key): name for key, name in worked_out.items()}} if worked_out else {}
        self.entries[entry] = Entry("optimizer", "", {"groups": groups, "state": state, **names})

    def name_free(self, wanted: str) -> str:
        name = wanted if ENTRY.fullmatch(wanted) else "extra"
        while name in self.entries or name in self.optimizers or name in self.unfit:
            name += "_"
        return name

    def pieces(self) -> Iterable[Piece]:
        for name, found in self.references.items():
            entry = self.tensors[name]
            if entry.alias_of:
                continue
            if isinstance(found, Parts):
                for start, part in found.parts.items():
                    yield _piece(f"{name}@{','.join(map(str, start))}", part, part.shape, entry.dtype)
            else:
                yield _piece(name, found, entry.shape, entry.dtype)

    def placed(self, places: dict[str, tuple[str, int]]) -> dict[str, TensorEntry]:
        """The tensors, with file and offset of each of `pieces`."""
        return {name: self._placed(name, entry, places) for name, entry in self.tensors.items()}

    def _placed(self, name: str, entry: TensorEntry, places: dict[str, tuple[str, int]]) -> TensorEntry:
        if entry.alias_of:
            return entry
        found = self.references[name]
        if not isinstance(found, Parts):
            return replace(entry, shards=(Stored(*places[name]),))
        keys = {start: f"{name}@{','.join(map(str, start))}" for start in found.parts}
        shards = (Stored(*places[key], start, found.parts[start].shape) for start, key in keys.items())
        return replace(entry, shards=tuple(shards))

    def _encoded(self, value: Any, where: str) -> Any:
        """As part of an optimizer's state."""
        return tree.encode(value, where, lambda leaf, there: self._leaf(leaf, there, _role(there)))

    def _leaf(self, value: Any, where: str, role: str = "tensor") -> Any:
        if isinstance(value, Reference | Parts):
            return {"$tensor": self._tensor(where, value, role)}
        if isinstance(value, np.ndarray) and tree.portable(value.dtype):
            while where in self.tensors:  # {"a/b": x, "a": {"b": y}} makes one path twice
                where += "~"
            native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
            self.references[where] = native.reshape(value.shape)
            self.tensors[where] = TensorEntry("array", str(native.dtype), value.shape)
            return {"$array": where}
        return tree.refuse(value, where)

    def _tensor(self, name: str, value: Any, role: str) -> str:
        if not isinstance(value, Reference | Parts):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, a tensor was expected", "import it as plain values"
            )
        if id(value) in self._named:
            self.tensors[name] = TensorEntry(role, alias_of=self._named[id(value)])
            return name if role in ("parameter", "buffer") else self._named[id(value)]
        while name in self.tensors:
            name += "~"
        for part in value.parts.values() if isinstance(value, Parts) else (value,):
            _check_inside(name, part)
        self._named[id(value)] = name
        self._kept.append(value)
        self.references[name] = value
        device = value.storage.device if isinstance(value, Reference) else ""
        self.tensors[name] = TensorEntry(role, value.dtype, value.shape, device=device)
        return name

    def tie(self) -> None:
        """Tensors of one storage: the same elements are a tie, a part of a larger one is a view."""
        largest: dict[str, str] = {}
        whole = {n: r for n, r in self.references.items() if isinstance(r, Reference) and _count(r)}
        for name, found in sorted(whole.items(), key=lambda item: -_count(item[1])):
            base = largest.setdefault(found.storage.key, name)
            first = whole[base]
            if base == name or first.dtype != found.dtype or not _contiguous(first):
                continue
            if (first.offset, first.shape, first.strides) == (found.offset, found.shape, found.strides):
                self.tensors[name] = TensorEntry(self.tensors[name].role, alias_of=base)
            elif first.offset <= found.offset and _last(found) <= _last(first):
                view = View(found.offset - first.offset, found.strides)
                self.tensors[name] = TensorEntry(
                    self.tensors[name].role, found.dtype, found.shape, alias_of=base, view=view
                )
        for name, entry in self.tensors.items():
            if entry.alias_of and self.tensors[entry.alias_of].alias_of:
                self.tensors[name] = replace(self.tensors[entry.alias_of], role=entry.role)


def _piece(key: str, found: Any, shape: tuple[int, ...], name: str) -> Piece:
    dtype = DTYPES[name]
    size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.bytes
    return Piece(
        key, dtype.code, shape if dtype.safetensors else (size_bytes,), size_bytes, dtype.bytes,
        partial(read_reference, found),
    )  # fmt: skip


def read_reference(found: "Reference | np.ndarray[Any, Any]", start: int, stop: int, out: memoryview) -> None:
    """Bytes of a tensor in logical order, straight from its file."""
    if isinstance(found, np.ndarray):
        out[:] = found.tobytes()[start:stop]
        return
    size = DTYPES[found.dtype].bytes
    descriptor = open_regular(Path(found.storage.file))
    try:
        if _contiguous(found):
            _read_at(found, descriptor, found.offset * size + start, out)
            return
        first, last = found.offset, _last(found) + 1
        block = memoryview(bytearray((last - first) * size))
        _read_at(found, descriptor, first * size, block)
        cells = np.frombuffer(block, np.dtype((np.void, size)))
        strides = tuple(stride * size for stride in found.strides)
        laid = np.lib.stride_tricks.as_strided(cells, found.shape, strides)
        out[:] = laid.tobytes()[start:stop]
    finally:
        os.close(descriptor)


def _read_at(found: Reference, descriptor: int, at: int, out: memoryview) -> None:
    done = 0
    while done < len(out):
        count = os.preadv(descriptor, [out[done:]], found.storage.offset + at + done)
        if not count:
            raise DamagedCheckpoint(f"{found.storage.file} ends while it is read")
        done += count


def _check_inside(name: str, found: Reference) -> None:
    if found.dtype not in DTYPES:
        raise CheckpointError(f"{name} has the dtype {found.dtype}", "save it as one that checkpoints hold")
    if _count(found) and (_last(found) + 1) * DTYPES[found.dtype].bytes > found.storage.bytes:
        raise CheckpointError(
            f"{name} claims elements beyond its storage of {found.storage.bytes} bytes", "is it whole?"
        )


def _count(found: Reference) -> int:
    count = 1
    for n in found.shape:
        count *= n
    return count


def _last(found: Reference) -> int:
    return found.offset + sum((n - 1) * s for n, s in zip(found.shape, found.strides, strict=True))


def _contiguous(found: Reference) -> bool:
    expected = 1
    for n, stride in zip(reversed(found.shape), reversed(found.strides), strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


def _is_float(value: Any) -> bool:
    return isinstance(value, Reference | Parts) and "float" in dtype_name(value.dtype)


def _role(where: str) -> str:
    return "master" if "master" in where.rpartition("/")[2] else "optimizer"
