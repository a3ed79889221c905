"""Reading a manifest that anybody may have written: what it may not be, and what it may not say.

A manifest that passes can be followed without harm: every name stays inside the folder, every file is a regular one,
and nothing is allocated that the files do not hold.
"""

import json
import math
import os
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.plain import from_plain
from workers.checkpoint.chunks import chunk_count
from workers.checkpoint.dtypes import DTYPES
from workers.checkpoint.manifest import (
    FILE,
    FORMAT,
    KINDS,
    LARGEST_BYTES,
    NAME,
    ROLES,
    VERSION,
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    TensorEntry,
    digest_of,
)
from workers.errors import CheckpointError


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`, whole and believable. Raises DamagedCheckpoint naming the file or tensor at fault."""
    data = read_json(folder)
    try:
        manifest = from_plain(Manifest, data)
    except UserError as e:
        raise DamagedCheckpoint(f"{folder / NAME}: {e.message}") from None
    if fault := _fault(manifest):
        raise DamagedCheckpoint(f"{folder / NAME}: {fault}")
    return manifest


def read_json(folder: Path) -> dict[str, Any]:
    """MANIFEST.json of `folder` with its digest and version checked, its content not yet."""
    path = folder / NAME
    try:
        data = json.loads(_read_regular(path), object_pairs_hook=_no_twins, parse_constant=_no_constant)
        digest = digest_of(data) if isinstance(data, dict) else ""
    except (ValueError, RecursionError) as e:
        raise DamagedCheckpoint(f"{path} is not the JSON that was saved: {e}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{path} is not a {FORMAT} manifest")
    if data.get("digest") != digest:
        raise DamagedCheckpoint(f"{path} does not match its own digest")
    if data.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {data.get('version')}, this Polyfleet reads version {VERSION}",
            "read it with a newer Polyfleet",
        )
    return data


def open_regular(path: Path) -> int:
    """A descriptor for reading. Raises DamagedCheckpoint for anything but a regular file: links, pipes, absence."""
    try:
        # Not blocking: opening a pipe would otherwise wait for its writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        reason = "it is a symbolic link" if path.is_symlink() else e.strerror
        raise DamagedCheckpoint(f"{path} cannot be opened: {reason}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedCheckpoint(f"{path} is not a regular file")
    return descriptor


def tensor_bytes(tensor: TensorEntry) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].bytes


def _fault(manifest: Manifest) -> str:
    if manifest.step < 0:
        return f"step {manifest.step} is negative"
    for name, file in manifest.files.items():
        if fault := _file_fault(name, file):
            return f"file {name!r} {fault}"
    for name, tensor in manifest.tensors.items():
        if fault := _tie_fault(manifest, tensor) if tensor.alias_of else _tensor_fault(manifest, tensor):
            return f"tensor {name!r} {fault}"
    for name, entry in manifest.entries.items():
        if entry.kind not in KINDS:
            return f"entry {name!r} is of the unknown kind {entry.kind!r}"
    return _overlap(manifest)


def _file_fault(name: str, file: FileEntry) -> str:
    if not FILE.fullmatch(name):
        return "is not the name of a shard in this folder"
    if file.bytes < 8:
        return f"claims {file.bytes} bytes"
    if len(file.xxh3_128) != chunk_count(file.bytes):
        return f"has {len(file.xxh3_128)} chunk hashes for {file.bytes} bytes"
    return ""


def _tie_fault(manifest: Manifest, tensor: TensorEntry) -> str:
    target = manifest.tensors.get(tensor.alias_of)
    if target is None or target.alias_of:
        return f"is tied to {tensor.alias_of!r}, which is not stored"
    return "" if tensor.role in ROLES else f"has the unknown role {tensor.role!r}"


def _tensor_fault(manifest: Manifest, tensor: TensorEntry) -> str:
    if tensor.role not in ROLES:
        return f"has the unknown role {tensor.role!r}"
    if tensor.dtype not in DTYPES:
        return f"has the unknown dtype {tensor.dtype!r}"
    if tensor.file not in manifest.files:
        return f"is in file {tensor.file!r}, which is not listed"
    if len(tensor.shape) > 64 or any(not 0 <= size < 2**63 for size in tensor.shape):
        return f"has the impossible shape {list(tensor.shape)[:65]}"
    if tensor.layout and sorted(tensor.layout) != list(range(len(tensor.shape))):
        return f"has layout {list(tensor.layout)} for {len(tensor.shape)} dimensions"
    size_bytes, file_bytes = tensor_bytes(tensor), manifest.files[tensor.file].bytes
    if tensor.offset < 0 or tensor.offset + size_bytes > file_bytes:
        return f"claims {size_bytes} bytes from {tensor.offset} on, its file has {file_bytes}"
    return ""


def _overlap(manifest: Manifest) -> str:
    stored = [(t.file, t.offset, tensor_bytes(t), name) for name, t in manifest.tensors.items() if not t.alias_of]
    for before, after in pairwise(sorted(place for place in stored if place[2])):
        if before[0] == after[0] and before[1] + before[2] > after[1]:
            return f"tensors {before[3]!r} and {after[3]!r} overlap in file {after[0]!r}"
    return ""


def _read_regular(path: Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as f:
        size_bytes = os.fstat(f.fileno()).st_size
        if size_bytes > LARGEST_BYTES:
            raise DamagedCheckpoint(f"{path} has {size_bytes} bytes, a manifest has at most {LARGEST_BYTES}")
        return f.read(LARGEST_BYTES)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return data


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
