"""The checkpoint format, versions 2 and 3. docs/checkpoint-format.md describes it in prose, for authors of readers.

    step-00001200-3f9a2c1b/       immutable: the name is the step and a random id, and never used again
        shard-00001.safetensors   plain safetensors of about 2 GiB (a larger tensor has a shard of its own)
        MANIFEST.json             written last: a folder without a valid one is not a checkpoint

MANIFEST.json is the JSON of `Manifest` below, and `digest` is the SHA-256 of its canonical form: keys sorted, no white
space, ASCII, without `digest` itself. Tensors are in the shards in logical order (C-contiguous, little-endian), under
the same names as here. Everything that is not a tensor is an entry's JSON `tree`. tree.py lists its typed leaves,
manifest_checks.py what is refused, and how version 1 is read. Nothing is pickled.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from cluster.serialization import to_plain
from workers.errors import CheckpointError

FORMAT = "polyfleet-checkpoint"
VERSION = 2
"""Written if it suffices, so that older readers can read the checkpoint."""
VERSION_WITH_NUMBERS = 3
"""Written if parameters of an optimizer have numbers and no names."""
RANDOM = "random"
"""Entry in which a job keeps the random state of its ranks: {"seed", "ranks": [{"device_type", …}, …]}."""

NAME = "MANIFEST.json"
CHUNK_BYTES = 8 << 20
"""Files are hashed per chunk, to verify partial reads and to locate a fault to 8 MiB."""
FOLDER = re.compile(r"step-(\d{8,})-([0-9a-f]{8})")
ENTRY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Pattern of entry names, which are the first part of their tensors' names."""
FILE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.))*\.safetensors")
"""Pattern of file names, also of those that an imported checkpoint keeps; never a path."""
ROLES = ("parameter", "buffer", "optimizer", "master", "rng", "tensor", "array")
KINDS = ("module", "optimizer", "stateful", "rng", "tree")
EXTRA_STATE = "_extra_state"
"""Suffix of state dict keys for the results of `get_extra_state`. Source: torch.nn.Module."""
MAX_MANIFEST_BYTES = 256 << 20
"""Maximum size of a manifest: enough for the names of a million tensors and the chunk hashes of some 20 TB."""
MAX_INLINE_BYTES = 4 << 20
"""Maximum size of a manifest that an agent reads itself: with any content that takes below 2 s and 128 MiB. A model of
70 billion parameters sharded over 64 ranks needs less. Larger ones are read in a child process.
"""
MAX_TENSORS = 1_000_000
MAX_PARTS_PER_TENSOR = 65_536
"""Maximum number of parts of one tensor, which is the maximum number of ranks that save together."""
MAX_TOTAL_PARTS = 2_000_000
"""Maximum number of parts of all tensors together."""
MAX_FILES = 262_144
MAX_CONTAINERS = 8_000_000
"""Maximum number of JSON lists and objects: eight for each tensor."""
MAX_VALUES = 32_000_000


DAMAGED_REMEDY = "load an older step, or copy this checkpoint again from its source"


class DamagedCheckpoint(CheckpointError):
    """The stored data differs from what was saved; an older checkpoint may still be sound."""

    def __init__(self, message: str, remedy: str = DAMAGED_REMEDY):
        super().__init__(message, remedy)


@dataclass(frozen=True, slots=True)
class Producer:
    """Who saved the checkpoint. `kind` is a device kind, `epoch` the attempt's."""

    polyfleet: str = ""
    torch: str = ""
    backend: str = ""
    kind: str = ""
    job: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One shard file. `xxh3_128` has one hexadecimal digest per 8 MiB chunk."""

    bytes: int
    xxh3_128: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A box of a tensor in a shard: its start and shape in the global tensor, both () for all of it.

    `offset` counts bytes from the start of the file, so that a box is read without reading the shard's header.
    """

    file: str
    offset: int
    start: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """A tensor that shared memory with a stored one. `strides` and `offset` count elements of that one, flattened."""

    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor, named `entry/name`; `dtype` is torch's name, also if the shard has raw U8 bytes.

    A tie has only `role` and `alias_of`, the name under which the same object is stored. A tensor that only shared
    memory with that one also has `dtype`, `shape` and `view`. `layout` is the order of the dimensions in memory,
    outermost first, if it was not the usual one: (0, 2, 3, 1) is channels_last; strides follow from it and the shape.
    `device` is where the tensor was, `scale` names the tensor that multiplies an fp8 one. The role `array` is a numpy
    array, which is loaded as one, on the host; `master` is a float32 copy that an optimizer updates in place of a
    parameter.
    """

    role: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    shards: tuple[Stored, ...] = ()
    device: str = ""
    layout: tuple[int, ...] = ()
    scale: str = ""
    alias_of: str = ""
    view: View | None = None


@dataclass(frozen=True, slots=True)
class World:
    """Number of ranks that saved together, with sizes and names of the dimensions of their mesh, if any."""

    size: int = 1
    mesh: tuple[int, ...] = ()
    dims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One entry of the saved state. A module's tensors are all those named `entry/…`; other kinds name theirs in
    `tree`.

    An optimizer's tree: {"groups": [{"parameters": [names], "options": {}}], "state": {parameter name: {slot: value}}}.
    An imported one may have numbers instead of names (optimizer_tree.py): its manifest has version 3.
    A random state's tree: {"seed": …, "python": …, "numpy": …, "torch": {device type: state}}.
    """

    kind: str
    type: str = ""
    tree: Any = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Form of an imported checkpoint, so that an export restores it. Loading does not need it.
    `files` maps each file's name in the source to its content, as a tree with the leaves that
    exchange/sources/source_form.py lists.
    """

    format: str
    files: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of MANIFEST.json. `created` is UTC, ISO 8601 with microseconds, so that it sorts as text."""

    step: int
    created: str
    producer: Producer
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    entries: dict[str, StateEntry]
    world: World = World()
    origin: Origin | None = None
    format: str = FORMAT
    version: int = VERSION
    digest: str = field(default="", compare=False)

    def resolve(self, name: str) -> str:
        """Return the name under which `name` is stored: itself, or its tie's target. A view is stored under its own
        name.
        """
        entry = self.tensors[name]
        return name if entry.view else entry.alias_of or name

    def stored(self) -> dict[str, TensorEntry]:
        """Tensors that have bytes of their own."""
        return {name: tensor for name, tensor in self.tensors.items() if not tensor.alias_of}

    def module_tensors(self, entry: str) -> list[str]:
        """Names of a module entry's parameters and buffers, ties included."""
        names = (n for n in self.tensors if n.startswith(f"{entry}/"))
        return [n for n in names if self.tensors[n].role in ("parameter", "buffer")]

    def size_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def extra_states(entry: StateEntry, decode: Callable[[Any], Any]) -> dict[str, Any]:
    """Results of `get_extra_state` in a module's entry, by their keys in torch's state dicts.
    Raises DamagedCheckpoint if the entry does not have them by prefix.
    """
    states = decode(entry.tree.get("extra_state", {})) if isinstance(entry.tree, dict) else {}
    if not isinstance(states, dict):
        raise DamagedCheckpoint(f"the manifest has extra state that is a {type(states).__name__}")
    return {f"{prefix}{EXTRA_STATE}": value for prefix, value in states.items()}


def manifest_digest(data: dict[str, Any]) -> str:
    """Digest of a manifest as JSON data; its own `digest` is left out."""
    rest = {key: value for key, value in data.items() if key != "digest"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def dump(manifest: Manifest) -> bytes:
    """Return the text of MANIFEST.json, digest included. Empty fields of a tensor are left out."""
    data = to_plain(manifest)
    if manifest.origin is None:
        del data["origin"]
    data["tensors"] = {name: _without_empty_fields(tensor) for name, tensor in data["tensors"].items()}
    data["digest"] = manifest_digest(data)
    return json.dumps(data, indent=1, allow_nan=False).encode("ascii")


_EMPTY: tuple[Any, ...] = (None, "", [], ())


def _without_empty_fields(tensor: dict[str, Any]) -> dict[str, Any]:
    fields = {key: value for key, value in tensor.items() if value not in _EMPTY or key == "role"}
    if "shards" in fields:
        fields["shape"] = tensor["shape"]  # written even if empty: () is the shape of a scalar
        fields["shards"] = [{k: v for k, v in s.items() if v not in _EMPTY} for s in fields["shards"]]
    return fields


def chunk_digest(data: "bytes | memoryview") -> str:
    return xxhash.xxh3_128(data).hexdigest()


def chunk_count(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)
