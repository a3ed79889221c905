"""State read from another format: entries whose tensors are still in the source files."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from workers.checkpoint.disk.layout import TensorPiece
from workers.checkpoint.exchange.pickles.strided import StridedSource, element_count, is_contiguous, last_index
from workers.checkpoint.exchange.pickles.tensors import ForeignTensor, InlineTensor, Parts, Reference
from workers.checkpoint.exchange.pickles.typed import TypedValue
from workers.checkpoint.exchange.sources.optimizer_state import (
    NotOptimizerStateError,
    OptimizerStateDict,
    not_portable_reason,
    read_state_dict,
)
from workers.checkpoint.exchange.sources.source_form import (
    EntryOf,
    encode_form,
    is_restored_by_export,
    state_dict,
    with_entries,
)
from workers.checkpoint.format import tree
from workers.checkpoint.format.dtypes import DTYPES, dtype_name
from workers.checkpoint.format.manifest import ENTRY, EXTRA_STATE, Origin, StateEntry, Stored, TensorEntry, View
from workers.checkpoint.format.message_text import first_names
from workers.checkpoint.format.optimizer_tree import Key
from workers.errors import CheckpointError

MAX_ENTRIES = 10_000
"""Maximum number of entries of one source: models, optimizers and other values."""
MAX_EXPANSION = 16
SMALL_BYTES = 64 << 20
"""Tensors may be larger than the bytes they are made of, because a stride of 0 repeats elements. All tensors of a
source together may be at most MAX_EXPANSION times as large, plus this.
"""


@dataclass(slots=True)
class ImportedState:
    """Entries, tensors and notes of one source, in any format.
    `tensors` are described without a location; `references` say where their bytes are. `invalid_optimizers` maps
    entries that look like an optimizer's state to the reason why they are not one. `ordered`: tensors are in their
    model's order. `step` is None if the source has none. `left_out` maps parts that are not imported to the reason.
    """

    step: int | None = None
    ordered: bool = True
    entries: dict[str, StateEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    references: dict[str, "Reference | Parts | np.ndarray[Any, Any]"] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    optimizers: dict[str, OptimizerStateDict] = field(default_factory=dict)
    invalid_optimizers: dict[str, str] = field(default_factory=dict)
    origin: Origin | None = None
    _files: dict[str, Any] = field(default_factory=dict)
    _entry_of: dict[int, str] = field(default_factory=dict)
    _name_of: dict[int, str] = field(default_factory=dict)
    _referenced: list[Any] = field(default_factory=list)

    def file(self, name: str, value: Any) -> None:
        """Store the content of file `name`, parts of which have become entries, for `file_forms`."""
        self._files[name] = value

    def safetensors_file(self, name: str, entry: str, metadata: dict[str, str]) -> None:
        """Store the form of a file, or of several with an index: the header's metadata, and the module it has."""
        self._files[name] = {"entry": entry, "metadata": metadata}

    def file_forms(self) -> dict[str, Any]:
        """Return the form of each file. Call it after all entries were added."""
        entry_of = {key: name if name in self.entries else "" for key, name in self._entry_of.items()}
        return {
            name: encode_form(with_entries(value, entry_of), name, self._named_leaf, self._encode_part)
            for name, value in self._files.items()
        }

    def _named_leaf(self, value: Any, path: str) -> Any:
        """Encode tensors and arrays by the names that they have in entries."""
        if name := self._name_of.get(id(value)):
            return {"$array" if isinstance(value, np.ndarray) else "$tensor": name}
        return self._leaf(value, path)

    def _encode_part(self, part: EntryOf, leaf: tree.Leaf) -> Any:
        """Return an entry's name if an export of the entry restores the value exactly; else the encoded value."""
        name, entry = part.name, self.entries[part.name]
        if entry.kind == "module" and not any(
            map(is_extra_state, part.value)
        ):  # extra state is stored between the tensors
            return state_dict(name, part.value)
        if entry.kind == "optimizer" and is_restored_by_export(part.value, self.optimizers[name]):
            return {"$entry": name}
        encoded = tree.encode(part.value, name, leaf)
        return {"$entry": name} if entry.kind == "tree" and encoded == entry.tree else encoded

    def module(self, entry: str, tensors: dict[str, Any]) -> None:
        """Add a state dict: tensors by name, and results of `get_extra_state`."""
        self._note_entry(entry, tensors)
        extra = {name: value for name, value in tensors.items() if is_extra_state(name)}
        for name, tensor in tensors.items():
            if name not in extra:
                self._tensor(f"{entry}/{name}", tensor, "parameter" if _is_float(tensor) else "buffer")
        states = {name.removesuffix(EXTRA_STATE): value for name, value in extra.items()}
        self.entries[entry] = StateEntry("module", "", tree.encode({"extra_state": states}, entry, self._leaf))

    def _note_entry(self, entry: str, value: Any) -> None:
        if isinstance(value, dict | list):  # numbers and tuples may be the same object under several keys
            self._entry_of[id(value)] = entry
            self._referenced.append(value)

    def plain(self, entry: str, value: Any) -> None:
        self._note_entry(entry, value)
        self.entries[entry] = StateEntry("tree", "", tree.encode(value, entry, self._leaf))

    def optimizer(self, entry: str, value: dict[str, Any]) -> None:
        """Store a state dict of torch.optim until all models, to which its parameters may belong, have been read."""
        self._note_entry(entry, value)
        if reason := not_portable_reason(value):
            self.notes.append(f"{entry}: an optimizer's state that {reason}; it is imported as plain values")
            self.plain(entry, value)
            return
        try:
            self.optimizers[entry] = read_state_dict(value)
        except NotOptimizerStateError as e:
            self.invalid_optimizers[entry] = str(e)

    def add_optimizer(
        self, entry: str, optimizer: OptimizerStateDict, certain: dict[Key, str], derived: dict[Key, str]
    ) -> None:
        """Add an optimizer's entry, by names if all are certain, else by numbers, with derived names."""
        groups = [
            {"parameters": [certain.get(key, key) for key in group], "options": self._encode(options, f"{entry}/{i}")}
            for i, (group, options) in enumerate(zip(optimizer.groups, optimizer.options, strict=True))
        ]
        keys = {key: str(certain.get(key, key)) for key in optimizer.state}
        state = {text: self._encode(dict(optimizer.state[key]), f"{entry}/state/{text}") for key, text in keys.items()}
        names = {"names": {str(key): name for key, name in derived.items()}} if derived else {}
        self.entries[entry] = StateEntry("optimizer", "", {"groups": groups, "state": state, **names})

    def free_name(self, preferred: str) -> str:
        if len(self.entries) + len(self.optimizers) + len(self.invalid_optimizers) > MAX_ENTRIES:
            raise CheckpointError(f"it has more than {MAX_ENTRIES} models and values", "import a part of it")
        name = preferred if ENTRY.fullmatch(preferred) else "extra"
        while name in self.entries or name in self.optimizers or name in self.invalid_optimizers:
            name += "_"
        return name

    def pieces(self) -> Iterable[TensorPiece]:
        for name, source in self.references.items():
            entry = self.tensors[name]
            if entry.alias_of:
                continue
            if isinstance(source, Parts):
                for start, part in source.parts.items():
                    yield _piece(f"{name}@{','.join(map(str, start))}", part, part.shape, entry.dtype)
            else:
                yield _piece(name, source, entry.shape, entry.dtype)

    def located_tensors(self, locations: dict[str, tuple[str, int]]) -> dict[str, TensorEntry]:
        """Return the tensors, with file and offset of each of `pieces`."""
        return {name: self._locate_tensor(name, entry, locations) for name, entry in self.tensors.items()}

    def _locate_tensor(self, name: str, entry: TensorEntry, locations: dict[str, tuple[str, int]]) -> TensorEntry:
        if entry.alias_of:
            return entry
        source = self.references[name]
        if not isinstance(source, Parts):
            return replace(entry, shards=(Stored(*locations[name]),))
        keys = {start: f"{name}@{','.join(map(str, start))}" for start in source.parts}
        shards = (Stored(*locations[key], start, source.parts[start].shape) for start, key in keys.items())
        return replace(entry, shards=tuple(shards))

    def _encode(self, value: Any, path: str) -> Any:
        """Encode part of an optimizer's state."""
        return tree.encode(value, path, lambda leaf, inner_path: self._leaf(leaf, inner_path, _role(inner_path)))

    def _leaf(self, value: Any, path: str, role: str = "tensor") -> Any:
        if isinstance(value, ForeignTensor):
            return {"$tensor": self._tensor(path, value, role)}
        if isinstance(value, TypedValue):
            return tree.encode(value.content(), path, lambda leaf, inner_path: self._leaf(leaf, inner_path, role))
        if isinstance(value, np.ndarray) and tree.is_portable(value.dtype):
            if id(value) in self._name_of:
                return {"$array": self._name_of[id(value)]}
            path = self._name_of[id(value)] = self._free_tensor_name(path)
            self._referenced.append(value)
            native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
            self.references[path] = native.reshape(value.shape)
            self.tensors[path] = TensorEntry("array", str(native.dtype), value.shape)
            return {"$array": path}
        return tree.raise_unsupported(value, path)

    def _tensor(self, name: str, value: Any, role: str) -> str:
        if not isinstance(value, ForeignTensor):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}; a tensor was expected", "import it as plain values"
            )
        if id(value) in self._name_of:
            self.tensors[name] = TensorEntry(role, alias_of=self._name_of[id(value)])
            return name if role in ("parameter", "buffer") else self._name_of[id(value)]
        name = self._free_tensor_name(name)
        for part in value.parts.values() if isinstance(value, Parts) else (value,):
            if isinstance(part, Reference):
                _check_inside(name, part)
        self._name_of[id(value)] = name
        self._referenced.append(value)
        self.references[name] = value.array if isinstance(value, InlineTensor) else value
        self.tensors[name] = TensorEntry(role, value.dtype, value.shape, device=value.device)
        return name

    def _free_tensor_name(self, name: str) -> str:
        """Return an unused name: {"a/b": x, "a": {"b": y}} gives the same path twice."""
        for count in range(100):
            if f"{name}{'~' * count}" not in self.tensors:
                return f"{name}{'~' * count}"
        raise CheckpointError(
            f"more than 100 tensors are called {name:.200}",
            "do not use this file: no standard program writes such files",
        )

    def check_expanded(self, source: str) -> None:
        """Raise CheckpointError if tensors declare many times the bytes that the source has for them."""
        own = {name: origin for name, origin in self.references.items() if not self.tensors[name].alias_of}
        parts = [(n, p) for n, f in own.items() for p in (f.parts.values() if isinstance(f, Parts) else (f,))]
        sizes = {n: 0 for n, _ in parts}
        stored: dict[str, int] = {}
        for name, part in parts:
            if isinstance(part, Reference):
                sizes[name] += element_count(part) * DTYPES[part.dtype].bytes
                stored[part.storage.key] = part.storage.bytes
        needed_bytes, stored_bytes = sum(sizes.values()), sum(stored.values())
        if needed_bytes > MAX_EXPANSION * stored_bytes + SMALL_BYTES:
            name = max(sizes, key=lambda n: sizes[n])
            needed, available = f"{needed_bytes / 2**20:.0f} MiB", f"{stored_bytes / 2**20:.2f}"
            raise CheckpointError(
                f"the tensors of {source} would take {needed} and are made of {available} MiB"
                f" ({name:.200}: {sizes[name] / 2**20:.0f} MiB);"
                f" at most {MAX_EXPANSION} times as much is written",
                "save expanded tensors before expanding them, or copy them with .contiguous()",
            )

    def mapped_bytes(self) -> Iterator[int]:
        """Yield the address space that each tensor needs while it is read."""
        for source in self.references.values():
            for part in source.parts.values() if isinstance(source, Parts) else (source,):
                if isinstance(part, Reference) and not is_contiguous(part):
                    yield part.storage.bytes

    def find_ties(self) -> None:
        """Find ties and views among tensors of one storage and dtype.
        Tensors with equal elements are a tie; a part of a larger tensor is a view.
        """
        largest: dict[tuple[Any, ...], str] = {}
        same: dict[tuple[Any, ...], str] = {}
        references = {n: r for n, r in self.references.items() if isinstance(r, Reference) and element_count(r)}
        for name, reference in sorted(
            references.items(), key=lambda item: (-element_count(item[1]), not is_contiguous(item[1]))
        ):
            meaning = (reference.storage.key, reference.dtype, reference.conj, reference.neg)
            elements = (*meaning, reference.offset, reference.shape, reference.strides)
            if same.setdefault(elements, name) != name:
                self.tensors[name] = TensorEntry(self.tensors[name].role, alias_of=same[elements])
                continue
            if meaning not in largest:
                if is_contiguous(reference):
                    largest[meaning] = name
                continue
            base = largest[meaning]
            first = references[base]
            if first.offset <= reference.offset and last_index(reference) <= last_index(first):
                view = View(reference.offset - first.offset, reference.strides)
                self.tensors[name] = TensorEntry(
                    self.tensors[name].role, reference.dtype, reference.shape, alias_of=base, view=view
                )
        for name, entry in self.tensors.items():
            if entry.alias_of and self.tensors[entry.alias_of].alias_of:
                self.tensors[name] = replace(self.tensors[entry.alias_of], role=entry.role)

    def note_shared(self) -> None:
        """Note tensors that share memory but are neither a tie nor a view: each is stored separately."""
        own = {n: r for n, r in self.references.items() if isinstance(r, Reference) and not self.tensors[n].alias_of}
        spans = sorted((r.storage.file, *_bytes_in(r), n) for n, r in own.items() if element_count(r))
        pairs = [
            f"{name} and {other}"
            for (file, _, end, name), (file2, start, _, other) in pairwise(spans)
            if file == file2 and start < end
        ]
        if pairs:
            self.notes.append(f"{first_names(pairs)} share memory in the file; in the checkpoint each has its own")


def is_extra_state(name: str) -> bool:
    """Check whether a state dict's key is for the result of a module's `get_extra_state`."""
    return name.rpartition(".")[2] == EXTRA_STATE


def _bytes_in(reference: Reference) -> tuple[int, int]:
    """Return where its first element starts in the file, and where its last one ends."""
    size = DTYPES[reference.dtype].bytes
    return reference.storage.offset + reference.offset * size, reference.storage.offset + (
        last_index(reference) + 1
    ) * size


def _piece(key: str, source: Any, shape: tuple[int, ...], name: str) -> TensorPiece:
    dtype = DTYPES[name]
    size_bytes = math.prod(shape) * dtype.bytes
    shape = shape if dtype.safetensors else (size_bytes,)
    return TensorPiece(key, dtype.code, shape, size_bytes, dtype.bytes, StridedSource(source).read)


def _check_inside(name: str, reference: Reference) -> None:
    if reference.dtype not in DTYPES:
        raise CheckpointError(
            f"{name} has the dtype {reference.dtype}", "save it with a dtype that checkpoints support"
        )
    if (
        element_count(reference)
        and (last_index(reference) + 1) * DTYPES[reference.dtype].bytes > reference.storage.bytes
    ):
        raise CheckpointError(
            f"{name} declares elements beyond its storage of {reference.storage.bytes} bytes",
            "check that the file is complete",
        )


def _is_float(value: Any) -> bool:
    return isinstance(value, ForeignTensor) and "float" in dtype_name(value.dtype)


def _role(path: str) -> str:
    return "master" if "master" in path.rpartition("/")[2] else "optimizer"
