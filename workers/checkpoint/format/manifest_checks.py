"""Read manifests from untrusted sources: check their form, their limits and their content.

A manifest that passes is safe to use: every name stays inside the folder, every file is a regular one, and nothing is
allocated that the files do not contain. The time this takes grows as n log n with the manifest's size, its memory is
bounded by the limits in manifest.py.
"""

import errno
import json
import math
import os
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

from workers.checkpoint.format import links
from workers.checkpoint.format.boxes import Box, full_box, tiling_fault
from workers.checkpoint.format.dtypes import DTYPES, FLOATS
from workers.checkpoint.format.manifest import (
    FILE,
    FORMAT,
    KINDS,
    MAX_CONTAINERS,
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    MAX_PARTS_PER_TENSOR,
    MAX_TENSORS,
    MAX_TOTAL_PARTS,
    MAX_VALUES,
    NAME,
    ROLES,
    VERSION,
    VERSION_WITH_NUMBERS,
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    Stored,
    TensorEntry,
    chunk_count,
    manifest_digest,
)
from workers.checkpoint.format.strict_types import WrongType, parse_dataclass
from workers.errors import CheckpointError

READABLE_VERSIONS = (1, VERSION, VERSION_WITH_NUMBERS)
"""Every published version stays readable."""


def read_manifest(folder: Path, follow: bool = False) -> Manifest:
    """Read and check the manifest of `folder`. Raises DamagedCheckpoint naming the file or tensor at fault."""
    return parse_manifest(_read_regular(folder / NAME, follow), str(folder / NAME))


def parse_manifest(text: bytes, source: str) -> Manifest:
    """Parse and check the text of a manifest; `source` names it in messages."""
    try:
        manifest = parse_dataclass(Manifest, _upgrade(_parse(text, source)))
    except WrongType as e:
        raise DamagedCheckpoint(f"{source}: {e}") from None
    if fault := _fault(manifest):
        raise DamagedCheckpoint(f"{source}: {fault:.500}")
    return manifest


def read_json(folder: Path) -> dict[str, Any]:
    """Read MANIFEST.json of `folder` with its digest and version checked, but not its content."""
    return _parse(_read_regular(folder / NAME), str(folder / NAME))


def _upgrade(data: dict[str, Any]) -> dict[str, Any]:
    """Convert a manifest's JSON from version 1 to 2. Its digest was checked before, on the original."""
    if data.get("version") != 1 or not isinstance(data.get("tensors"), dict):
        return data
    tensors = {name: _of_version_1(tensor) for name, tensor in data["tensors"].items()}
    return data | {"version": 2, "tensors": tensors}


def _of_version_1(tensor: Any) -> Any:
    """Convert one tensor. Version 1 stored each tensor once, at `file` and `offset`, and had no shards or views."""
    if not isinstance(tensor, dict) or "file" not in tensor:
        return tensor
    rest = {key: value for key, value in tensor.items() if key not in ("file", "offset")}
    return rest | {"shards": [{"file": tensor["file"], "offset": tensor.get("offset", 0)}]}


def _parse(text: bytes, source: str) -> dict[str, Any]:
    if text.startswith(links.LFS_POINTER):
        raise DamagedCheckpoint(*links.pointer_message(source))
    _check_size(text, source)
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        digest = manifest_digest(data) if isinstance(data, dict) else ""
    except (ValueError, RecursionError) as e:
        raise DamagedCheckpoint(f"{source} is not the JSON that was saved: {e}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{source} is not a {FORMAT} manifest")
    if data.get("digest") != digest:
        raise DamagedCheckpoint(f"{source} does not match its own digest")
    if data.get("version") not in READABLE_VERSIONS:
        raise CheckpointError(
            f"{source} has format version {data.get('version')}, this Polyfleet reads versions"
            f" {READABLE_VERSIONS[0]} to {READABLE_VERSIONS[-1]}",
            "read it with a newer Polyfleet",
        )
    return data


def _check_size(text: bytes, path: str) -> None:
    """Check size and complexity before parsing, which takes up to a hundred times the text's size."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise DamagedCheckpoint(f"{path} has {len(text)} bytes, a manifest has at most {MAX_MANIFEST_BYTES}")
    if not text.isascii():
        raise DamagedCheckpoint(f"{path} is not the JSON that was saved: it is not ASCII")
    if text.count(b"[") + text.count(b"{") > MAX_CONTAINERS or text.count(b",") > MAX_VALUES:
        raise DamagedCheckpoint(
            f"{path} has more than {MAX_CONTAINERS} lists and objects, or {MAX_VALUES} values",
            "split it into several checkpoints",
        )


def open_regular(path: Path, follow: bool = False) -> int:
    """Open a regular file for reading and return the descriptor.
    Raises DamagedCheckpoint for anything else: pipes, missing files, and links, unless they are followed (see
    links.py).
    """
    follow = follow or links.are_followed()
    # Non-blocking: opening a pipe would otherwise wait forever for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as e:
        raise _open_error(path, e, follow) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedCheckpoint(f"{path} is not a regular file", "replace it with a regular file")
    return descriptor


def _open_error(path: Path, error: OSError, follow: bool) -> DamagedCheckpoint:
    """Describe why a file could not be opened. Only a missing file is damage; other causes have their own remedy."""
    message = f"{path} cannot be opened"
    if path.is_symlink() and not follow:
        return DamagedCheckpoint(f"{message}: it is a symbolic link", "replace the link with the file itself")
    if path.is_symlink() and error.errno in (errno.ENOENT, errno.ELOOP):
        remedy = "restore that file, e.g. download it again"
        return DamagedCheckpoint(f"{message}: it is a link to {path.readlink()}, which does not exist", remedy)
    if error.errno in (errno.EACCES, errno.EPERM):
        return DamagedCheckpoint(f"{message}: {error.strerror}", "allow this user to read it, then run it again")
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return DamagedCheckpoint(
            f"{message}: {error.strerror}", "raise the limit of open files or memory, then run it again"
        )
    return DamagedCheckpoint(f"{message}: {error.strerror}")


def tensor_bytes(tensor: TensorEntry) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].bytes


def stored_box(tensor: TensorEntry, stored: Stored) -> Box:
    """Return the box of a tensor that is stored there."""
    return Box(stored.start, stored.shape) if stored.start else full_box(tensor.shape)


def box_bytes(tensor: TensorEntry, stored: Stored) -> int:
    return stored_box(tensor, stored).count * DTYPES[tensor.dtype].bytes


def _fault(manifest: Manifest) -> str:
    if fault := _count_fault(manifest):
        return fault
    for name, file in manifest.files.items():
        if fault := _file_fault(name, file):
            return f"file {name!r} {fault}"
    for name, tensor in manifest.tensors.items():
        if fault := _tensor_fault(manifest, tensor):
            return f"tensor {name!r} {fault}"
    for name, entry in manifest.entries.items():
        if entry.kind not in KINDS:
            return f"entry {name!r} is of the unknown kind {entry.kind!r}"
    return _overlap(manifest)


def _count_fault(manifest: Manifest) -> str:
    if manifest.step < 0:
        return f"step {max(manifest.step, -(2**63))} is negative"
    if manifest.step >= 2**63:
        return "its step is beyond 64 bits"
    if len(manifest.files) > MAX_FILES:
        return f"it lists {len(manifest.files)} files, at most {MAX_FILES} are read"
    if len(manifest.tensors) > MAX_TENSORS:
        return f"it has {len(manifest.tensors)} tensors, at most {MAX_TENSORS} are read"
    if (parts := sum(len(tensor.shards) for tensor in manifest.tensors.values())) > MAX_TOTAL_PARTS:
        return f"its tensors have {parts} parts together, at most {MAX_TOTAL_PARTS} are read"
    return ""


def _file_fault(name: str, file: FileEntry) -> str:
    if not FILE.fullmatch(name):
        return "is not the name of a shard in this folder"
    if file.bytes < 8:
        return f"declares {file.bytes} bytes"
    if len(file.xxh3_128) != chunk_count(file.bytes):
        return f"has {len(file.xxh3_128)} chunk hashes for {file.bytes} bytes"
    return ""


def _tensor_fault(manifest: Manifest, tensor: TensorEntry) -> str:
    if tensor.role not in ROLES:
        return f"has the unknown role {tensor.role!r}"
    if tensor.alias_of:
        return _tie_fault(manifest, tensor)
    if fault := _form_fault(tensor):
        return fault
    if tensor.scale and manifest.tensors.get(tensor.scale, tensor).dtype not in FLOATS:
        return f"is scaled by {tensor.scale!r}, which is not a stored floating-point tensor"
    faults = (_stored_fault(manifest, tensor, stored) for stored in tensor.shards)
    return next(filter(None, faults), "") or _tiling_fault(tensor)


def _tie_fault(manifest: Manifest, tensor: TensorEntry) -> str:
    target = manifest.tensors.get(tensor.alias_of)
    if target is None or target.alias_of:
        return f"is tied to {tensor.alias_of!r}, which is not stored"
    if tensor.view is None:
        return ""
    view, sizes = tensor.view, tensor.shape
    if fault := _form_fault(tensor):
        return fault
    if tensor.dtype != target.dtype or len(view.strides) != len(sizes) or min(view.offset, 0, *view.strides) < 0:
        return f"is not a view of {tensor.alias_of!r}"
    last = view.offset + sum((size - 1) * stride for size, stride in zip(sizes, view.strides, strict=True))
    if math.prod(sizes) and last >= math.prod(target.shape):
        return f"views element {last} of {tensor.alias_of!r}, which has {math.prod(target.shape)}"
    return ""


def _form_fault(tensor: TensorEntry) -> str:
    if tensor.dtype not in DTYPES:
        return f"has the unknown dtype {tensor.dtype!r}"
    if len(tensor.shape) > 64 or any(not 0 <= size < 2**63 for size in tensor.shape):
        return f"has the impossible shape {list(tensor.shape)[:65]}"
    if tensor.layout and sorted(tensor.layout) != list(range(len(tensor.shape))):
        return f"has layout {list(tensor.layout)} for {len(tensor.shape)} dimensions"
    return ""


def _stored_fault(manifest: Manifest, tensor: TensorEntry, stored: Stored) -> str:
    if stored.file not in manifest.files:
        return f"is in file {stored.file!r}, which is not listed"
    if stored.start and not full_box(tensor.shape).contains(stored_box(tensor, stored)):
        return f"has a shard from {list(stored.start)} of shape {list(stored.shape)}, outside {list(tensor.shape)}"
    size_bytes, file_bytes = box_bytes(tensor, stored), manifest.files[stored.file].bytes
    if stored.offset < 0 or stored.offset + size_bytes > file_bytes:
        return f"declares {size_bytes} bytes at offset {stored.offset}, its file has {file_bytes}"
    return ""


def _tiling_fault(tensor: TensorEntry) -> str:
    if not tensor.shards:
        return "has no shard"
    if len(tensor.shards) > MAX_PARTS_PER_TENSOR:
        return f"has {len(tensor.shards)} parts, at most {MAX_PARTS_PER_TENSOR} are read"
    if len(tensor.shards) == 1 and not tensor.shards[0].start:
        return ""
    return tiling_fault(full_box(tensor.shape), [stored_box(tensor, stored) for stored in tensor.shards])


def _overlap(manifest: Manifest) -> str:
    spans = sorted(
        (stored.file, stored.offset, box_bytes(tensor, stored), name)
        for name, tensor in manifest.stored().items()
        for stored in tensor.shards
    )
    for first, second in pairwise(span for span in spans if span[2]):
        if first[0] == second[0] and first[1] + first[2] > second[1]:
            return f"tensors {first[3]!r} and {second[3]!r} overlap in file {second[0]!r}"
    return ""


def _read_regular(path: Path, follow: bool = False) -> bytes:
    with os.fdopen(open_regular(path, follow), "rb") as f:
        size_bytes = os.fstat(f.fileno()).st_size
        if size_bytes > MAX_MANIFEST_BYTES:
            raise DamagedCheckpoint(f"{path} has {size_bytes} bytes, a manifest has at most {MAX_MANIFEST_BYTES}")
        return f.read(size_bytes)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return data


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
