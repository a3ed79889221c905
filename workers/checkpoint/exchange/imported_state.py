"""What an importer found, whatever it came from: entries whose tensors still lie in files of others."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from workers.checkpoint.disk.layout import TensorPiece
from workers.checkpoint.exchange.optimizer_state import (
    NotOptimizerStateError,
    OptimizerStateDict,
    not_portable_reason,
    read_state_dict,
)
from workers.checkpoint.exchange.source_form import EntryOf, encode_form, renders, state_dict, with_entries
from workers.checkpoint.exchange.strided import StridedSource, count_of, in_order, last_of
from workers.checkpoint.exchange.tensors import ForeignTensor, InlineTensor, Parts, Reference
from workers.checkpoint.exchange.typed import Typed
from workers.checkpoint.format import tree
from workers.checkpoint.format.dtypes import DTYPES, dtype_name
from workers.checkpoint.format.manifest import ENTRY, EXTRA_STATE, Entry, Origin, Stored, TensorEntry, View
from workers.checkpoint.format.message_text import first_names
from workers.checkpoint.format.optimizer_tree import Key
from workers.errors import CheckpointError

MOST_ENTRIES = 10_000
"""Models, optimizers and other values that one source holds side by side."""
EXPANDED = 16
SMALL_BYTES = 64 << 20
"""Tensors may be larger than the bytes they are made of: one whose stride is 0 repeats them. All of a source together
are at most 16 times as large, and this much more."""


@dataclass(slots=True)
class ImportedState:
    """`tensors` are described without a place. `references` say where their bytes are now. `unfit` says of entries
    that look like an optimizer's state why they are none. `ordered`: tensors come in the order their model has.
    `step` is None where the source tells none. `left_out` says of each part of the source that is not taken why."""

    step: int | None = None
    ordered: bool = True
    entries: dict[str, Entry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    references: dict[str, "Reference | Parts | np.ndarray[Any, Any]"] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    optimizers: dict[str, OptimizerStateDict] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    origin: Origin | None = None
    _files: dict[str, Any] = field(default_factory=dict)
    _entry_of: dict[int, str] = field(default_factory=dict)
    _named: dict[int, str] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    def file(self, name: str, value: Any) -> None:
        """What file `name` held, of which parts have become entries: its form is remembered."""
        self._files[name] = value

    def safetensors_file(self, name: str, entry: str, metadata: dict[str, str]) -> None:
        """What is remembered of one, or of several with an index: its header's texts and whose tensors it has."""
        self._files[name] = {"entry": entry, "metadata": metadata}

    def forms(self) -> dict[str, Any]:
        """The form of each file. To be called once all entries are made."""
        entry_of = {key: name if name in self.entries else "" for key, name in self._entry_of.items()}
        return {
            name: encode_form(with_entries(value, entry_of), name, self._named_leaf, self._form)
            for name, value in self._files.items()
        }

    def _named_leaf(self, value: Any, where: str) -> Any:
        """Tensors and arrays under the names that the entries gave them."""
        if name := self._named.get(id(value)):
            return {"$array" if isinstance(value, np.ndarray) else "$tensor": name}
        return self._leaf(value, where)

    def _form(self, found: EntryOf, leaf: tree.Leaf) -> Any:
        """An entry's name where an export of the entry gives the value as it was; else the value."""
        name, entry = found.name, self.entries[found.name]
        if entry.kind == "module" and not any(map(is_extra_state, found.value)):  # whose place is in between tensors
            return state_dict(name, found.value)
        if entry.kind == "optimizer" and renders(found.value, self.optimizers[name]):
            return {"$entry": name}
        spelled = tree.encode(found.value, name, leaf)
        return {"$entry": name} if entry.kind == "tree" and spelled == entry.tree else spelled

    def module(self, entry: str, tensors: dict[str, Any]) -> None:
        """A state dict: tensors by name, and what modules gave in `get_extra_state`."""
        self._becomes(entry, tensors)
        extra = {name: value for name, value in tensors.items() if is_extra_state(name)}
        for name, tensor in tensors.items():
            if name not in extra:
                self._tensor(f"{entry}/{name}", tensor, "parameter" if _is_float(tensor) else "buffer")
        states = {name.removesuffix(EXTRA_STATE): value for name, value in extra.items()}
        self.entries[entry] = Entry("module", "", tree.encode({"extra_state": states}, entry, self._leaf))

    def _becomes(self, entry: str, value: Any) -> None:
        if isinstance(value, dict | list):  # a number or a tuple may be one object in several places
            self._entry_of[id(value)] = entry
            self._kept.append(value)

    def plain(self, entry: str, value: Any) -> None:
        self._becomes(entry, value)
        self.entries[entry] = Entry("tree", "", tree.encode(value, entry, self._leaf))

    def optimizer(self, entry: str, value: dict[str, Any]) -> None:
        """A state dict of torch.optim, put aside until the models are known that its parameters may belong to."""
        self._becomes(entry, value)
        if why := not_portable_reason(value):
            self.notes.append(f"{entry}: an optimizer's state that {why}; it stays plain values")
            self.plain(entry, value)
            return
        try:
            self.optimizers[entry] = read_state_dict(value)
        except NotOptimizerStateError as e:
            self.unfit[entry] = str(e)

    def place_optimizer(
        self, entry: str, told: OptimizerStateDict, named: dict[Key, str], worked_out: dict[Key, str]
    ) -> None:
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
        if len(self.entries) + len(self.optimizers) + len(self.unfit) > MOST_ENTRIES:
            raise CheckpointError(f"it holds more than {MOST_ENTRIES} things side by side", "import a part of it")
        name = wanted if ENTRY.fullmatch(wanted) else "extra"
        while name in self.entries or name in self.optimizers or name in self.unfit:
            name += "_"
        return name

    def pieces(self) -> Iterable[TensorPiece]:
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
        if isinstance(value, ForeignTensor):
            return {"$tensor": self._tensor(where, value, role)}
        if isinstance(value, Typed):
            return tree.encode(value.content(), where, lambda leaf, there: self._leaf(leaf, there, role))
        if isinstance(value, np.ndarray) and tree.portable(value.dtype):
            if id(value) in self._named:
                return {"$array": self._named[id(value)]}
            where = self._named[id(value)] = self._free(where)
            self._kept.append(value)
            native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
            self.references[where] = native.reshape(value.shape)
            self.tensors[where] = TensorEntry("array", str(native.dtype), value.shape)
            return {"$array": where}
        return tree.raise_unsupported(value, where)

    def _tensor(self, name: str, value: Any, role: str) -> str:
        if not isinstance(value, ForeignTensor):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, a tensor was expected", "import it as plain values"
            )
        if id(value) in self._named:
            self.tensors[name] = TensorEntry(role, alias_of=self._named[id(value)])
            return name if role in ("parameter", "buffer") else self._named[id(value)]
        name = self._free(name)
        for part in value.parts.values() if isinstance(value, Parts) else (value,):
            if isinstance(part, Reference):
                _check_inside(name, part)
        self._named[id(value)] = name
        self._kept.append(value)
        self.references[name] = value.array if isinstance(value, InlineTensor) else value
        self.tensors[name] = TensorEntry(role, value.dtype, value.shape, device=value.device)
        return name

    def _free(self, name: str) -> str:
        """{"a/b": x, "a": {"b": y}} makes one path twice."""
        for more in range(100):
            if f"{name}{'~' * more}" not in self.tensors:
                return f"{name}{'~' * more}"
        raise CheckpointError(f"more than 100 tensors are called {name:.200}", "no program writes such a file")

    def check_expanded(self, source: str) -> None:
        """Raises CheckpointError where tensors claim many times the bytes that the source has for them."""
        own = {name: found for name, found in self.references.items() if not self.tensors[name].alias_of}
        parts = [(n, p) for n, f in own.items() for p in (f.parts.values() if isinstance(f, Parts) else (f,))]
        sizes = {n: 0 for n, _ in parts}
        held: dict[str, int] = {}
        for name, part in parts:
            if isinstance(part, Reference):
                sizes[name] += count_of(part) * DTYPES[part.dtype].bytes
                held[part.storage.key] = part.storage.bytes
        wanted_bytes, held_bytes = sum(sizes.values()), sum(held.values())
        if wanted_bytes > EXPANDED * held_bytes + SMALL_BYTES:
            name = max(sizes, key=lambda n: sizes[n])
            wanted, has = f"{wanted_bytes / 2**20:.0f} MiB", f"{held_bytes / 2**20:.2f}"
            raise CheckpointError(
                f"the tensors of {source} would take {wanted} and are made of {has}"
                f" ({name:.200}: {sizes[name] / 2**20:.0f} MiB);"
                f" at most {EXPANDED} times as much is written",
                "save expanded tensors unexpanded, or as they are with .contiguous()",
            )

    def mapped_bytes(self) -> Iterator[int]:
        """The address space that each tensor takes while it is read."""
        for found in self.references.values():
            for part in found.parts.values() if isinstance(found, Parts) else (found,):
                if isinstance(part, Reference) and not in_order(part):
                    yield part.storage.bytes

    def tie(self) -> None:
        """Tensors of one storage with the same meaning of its bits: the same elements are a tie, a part of a larger
        one is a view."""
        largest: dict[tuple[Any, ...], str] = {}
        same: dict[tuple[Any, ...], str] = {}
        whole = {n: r for n, r in self.references.items() if isinstance(r, Reference) and count_of(r)}
        for name, found in sorted(whole.items(), key=lambda item: (-count_of(item[1]), not in_order(item[1]))):
            meaning = (found.storage.key, found.dtype, found.conj, found.neg)
            elements = (*meaning, found.offset, found.shape, found.strides)
            if same.setdefault(elements, name) != name:
                self.tensors[name] = TensorEntry(self.tensors[name].role, alias_of=same[elements])
                continue
            if meaning not in largest:
                if in_order(found):
                    largest[meaning] = name
                continue
            base = largest[meaning]
            first = whole[base]
            if first.offset <= found.offset and last_of(found) <= last_of(first):
                view = View(found.offset - first.offset, found.strides)
                self.tensors[name] = TensorEntry(
                    self.tensors[name].role, found.dtype, found.shape, alias_of=base, view=view
                )
        for name, entry in self.tensors.items():
            if entry.alias_of and self.tensors[entry.alias_of].alias_of:
                self.tensors[name] = replace(self.tensors[entry.alias_of], role=entry.role)

    def note_shared(self) -> None:
        """Say which tensors lie in the same memory and are neither a tie nor a view: each becomes one of its own."""
        own = {n: r for n, r in self.references.items() if isinstance(r, Reference) and not self.tensors[n].alias_of}
        spans = sorted((r.storage.file, *_bytes_in(r), n) for n, r in own.items() if count_of(r))
        pairs = [
            f"{name} and {other}"
            for (file, _, end, name), (file2, start, _, other) in pairwise(spans)
            if file == file2 and start < end
        ]
        if pairs:
            self.notes.append(f"{first_names(pairs)} share memory in the file; here each has its own")


def is_extra_state(name: str) -> bool:
    """Whether it is a key of a state dict for what a module gave in `get_extra_state`."""
    return name.rpartition(".")[2] == EXTRA_STATE


def _bytes_in(found: Reference) -> tuple[int, int]:
    """Where its first element begins in the file, and its last one ends."""
    size = DTYPES[found.dtype].bytes
    return found.storage.offset + found.offset * size, found.storage.offset + (last_of(found) + 1) * size


def _piece(key: str, found: Any, shape: tuple[int, ...], name: str) -> TensorPiece:
    dtype = DTYPES[name]
    size_bytes = math.prod(shape) * dtype.bytes
    shape = shape if dtype.safetensors else (size_bytes,)
    return TensorPiece(key, dtype.code, shape, size_bytes, dtype.bytes, StridedSource(found).read)


def _check_inside(name: str, found: Reference) -> None:
    if found.dtype not in DTYPES:
        raise CheckpointError(f"{name} has the dtype {found.dtype}", "save it as one that checkpoints hold")
    if count_of(found) and (last_of(found) + 1) * DTYPES[found.dtype].bytes > found.storage.bytes:
        raise CheckpointError(
            f"{name} declares elements beyond its storage of {found.storage.bytes} bytes",
            "check that the file is complete",
        )


def _is_float(value: Any) -> bool:
    return isinstance(value, ForeignTensor) and "float" in dtype_name(value.dtype)


def _role(where: str) -> str:
    return "master" if "master" in where.rpartition("/")[2] else "optimizer"
