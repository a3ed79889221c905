"""The checkpoint format, version 1.

    step-00001200-3f9a2c1b/       immutable: the name is the step and a random id, and never used again
        shard-00001.safetensors   plain safetensors of at most 1 GiB (a larger tensor has a shard of its own)
        MANIFEST.json             written last: a folder without a valid one is no checkpoint

MANIFEST.json is the JSON of `Manifest` below, and `digest` is the SHA-256 of its canonical form: keys sorted, no white
space, ASCII, without `digest` itself. Tensors lie in the shards in logical order (C-contiguous, little-endian), under
the same names as here. Everything that is not a tensor is an entry's JSON `tree`; tree.py lists its typed leaves, and
checks.py what a manifest may not say. Nothing is pickled.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from cluster.plain import to_plain
from workers.errors import CheckpointError

FORMAT = "polyfleet-checkpoint"
VERSION = 1
RANDOM = "random"
"""The entry in which a job keeps the random state of its ranks: {"seed", "ranks": [{"device_type", …}, …]}."""

NAME = "MANIFEST.json"
FOLDER = re.compile(r"step-(\d{8,})-([0-9a-f]{8})")
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors")
ROLES = ("parameter", "buffer", "optimizer", "rng", "tensor", "array")
KINDS = ("module", "optimizer", "stateful", "rng", "tree")
LARGEST_BYTES = 256 << 20
"""Of a manifest: room for the names of a million tensors and the chunk hashes of some 20 TB."""


class DamagedCheckpoint(CheckpointError):
    """What is stored is not what was saved; an older checkpoint may still be sound."""

    def __init__(self, message: str, remedy: str = "load an older step, or copy this checkpoint again from its source"):
        super().__init__(message, remedy)


@dataclass(frozen=True, slots=True)
class Producer:
    """Who saved it. `kind` is a device kind, `epoch` the attempt's."""

    polyfleet: str = ""
    torch: str = ""
    backend: str = ""
    kind: str = ""
    job: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class FileEntry:
    """`xxh3_128` has one hexadecimal digest per 8 MiB chunk."""

    bytes: int
    xxh3_128: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor, named `entry/name`. A tie has only `role` and `alias_of`, the name under which the tensor is stored.

    `offset` counts from the beginning of the file, so that a tensor is read without reading the shard's header.
    `layout` is the order of the dimensions in memory, outermost first, where it was not the usual one: (0, 2, 3, 1) is
    channels_last. `device` is where the tensor was. `dtype` is torch's name, also where the shard holds raw U8 bytes.
    A role of `array` is a numpy array, which stays one, on the host.
    """

    role: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    file: str = ""
    offset: int = 0
    device: str = ""
    layout: tuple[int, ...] = ()
    alias_of: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the saved state. A module's tensors are all those named `entry/…`; the others' are named in `tree`.

    An optimizer's tree: {"groups": [{"parameters": [names], "options": {}}], "state": {parameter name: {slot: value}}}.
    The random state's: {"seed": …, "python": …, "numpy": …, "torch": {device type: state}}.
    """

    kind: str
    type: str = ""
    tree: Any = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """`created` is UTC, ISO 8601 with microseconds, so that it sorts as text."""

    step: int
    created: str
    producer: Producer
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    entries: dict[str, Entry]
    format: str = FORMAT
    version: int = VERSION
    digest: str = field(default="", compare=False)

    def resolve(self, name: str) -> str:
        """The name under which `name` is stored: itself, or its tie."""
        return self.tensors[name].alias_of or name

    def size_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def digest_of(data: dict[str, Any]) -> str:
    """Of a manifest as JSON data; its own `digest` is left out."""
    rest = {key: value for key, value in data.items() if key != "digest"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def dump(manifest: Manifest) -> bytes:
    """The text of MANIFEST.json, digest included. Fields of a tensor that say nothing are left out."""
    data = to_plain(manifest)
    data["tensors"] = {name: _telling(tensor) for name, tensor in data["tensors"].items()}
    data["digest"] = digest_of(data)
    return json.dumps(data, indent=1, allow_nan=False).encode("ascii")


def _telling(tensor: dict[str, Any]) -> dict[str, Any]:
    if tensor["alias_of"]:
        return {key: tensor[key] for key in ("role", "alias_of")}
    return {key: value for key, value in tensor.items() if key != "alias_of" and (key != "layout" or value)}
