"""Whether what a script has saved is whole. A save that was cut off must never be handed on as a checkpoint.

What tells, format by format:

    torch         a zip archive: its list of entries is written last, and every entry has a CRC
    safetensors   its header says how long the file is
    dcp           `.metadata` is written last: it is there, and no file of data is newer
    accelerate    `random_states_0.pkl` is written after model and optimizer, objects of the user's after that
    trainer       `trainer_state.json` is written after model and optimizer

A folder is whole when each of its files is, too. Of a folder with many saves (`checkpoint-500`, `checkpoint-1000`) the
newest counts: that is the one from which its program resumes. What has none of these forms cannot be told, and is
`unread`.
"""

import os
import stat
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple

from cluster import sandbox
from cluster.untrusted_files import UnreadableFile, parse_json
from workers.checkpoint.exchange.folders import RANDOM_STATES, TRAINER_STATE, numbered_folders
from workers.checkpoint.exchange.formats import SUFFIXES, format_of
from workers.checkpoint.exchange.safetensors_files import LARGEST_HEADER_BYTES
from workers.checkpoint.exchange.torch_archive import UNREADABLE
from workers.checkpoint.format.manifest_checks import open_regular
from workers.errors import CheckpointError

AT_ONCE_BYTES = 4 << 20
LEAST_BYTES = 4
"""Of any format: by these it is known."""
_SHARDED = ("*/.metadata", "*/*.distcp")
"""In folders of DCP within it, as FSDP's."""
FILES = ("torch", "safetensors")
"""Formats of single files; all but `torch` may be folders."""


class Seen(NamedTuple):
    """`state` is absent, torn, whole, or unread: nobody can tell. `why` says what is wrong, or what is not known."""

    state: str
    format: str = ""
    why: str = ""


def look(path: Path, format: str = "auto") -> Seen:  # noqa: A002
    """Reads all of it."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return Seen("absent")
    if stat.S_ISDIR(mode):
        return _folder(path, format) if any(files_below(path)) else Seen("absent")
    if not stat.S_ISREG(mode):
        return Seen("unread", "", "it is no file and no folder")
    if (size_bytes := path.stat().st_size) < LEAST_BYTES:
        return Seen("torn", "", f"it has {size_bytes} bytes")
    known = _known(path) if format == "auto" else format
    if known not in FILES:
        return Seen("unread", "", f"{known} writes folders, and it is a file" if known else "its format is not known")
    return _file(path, known)


def _known(path: Path) -> str:
    try:
        if path.is_dir() and not (path / ".metadata").is_file() and any(path.glob("*.distcp")):
            return "dcp"
        return format_of(path)
    except CheckpointError:
        return ""


def _file(path: Path, known: str) -> Seen:
    sandbox.raise_limits(data_bytes=path.stat().st_size)
    with os.fdopen(open_regular(path), "rb") as file:
        if known == "torch" and file.read(2) != b"PK":
            return Seen("unread", known, "it is no zip archive, as torch.save writes since torch 1.6")
        why = (_cut_archive if known == "torch" else _cut_safetensors)(file)
    return Seen("torn" if why else "whole", known, why)


def _cut_archive(file: IO[bytes]) -> str:
    """Every byte against its CRC."""
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                with archive.open(info) as entry:
                    while entry.read(AT_ONCE_BYTES):
                        continue
    except UNREADABLE as e:
        return f"it was not written to its end, or has changed: {e!s:.200}"
    return ""


def _cut_safetensors(file: IO[bytes]) -> str:
    file.seek(0)
    head, size_bytes = file.read(8), os.fstat(file.fileno()).st_size
    header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
    if not 0 < header_bytes <= min(size_bytes - 8, LARGEST_HEADER_BYTES):
        return "it ends within its header"
    sandbox.raise_limits(metadata_bytes=header_bytes)
    try:
        header = parse_json(file.read(header_bytes), "the header")
        ends = [told["data_offsets"][1] for name, told in header.items() if name != "__metadata__"]
        told_bytes = 8 + header_bytes + max(ends, default=0)
    except (UnreadableFile, AttributeError, KeyError, IndexError, TypeError) as e:
        return f"its header says nothing sensible: {e!s:.200}"
    return "" if told_bytes == size_bytes else f"it has {size_bytes} bytes, its header tells {told_bytes}"


def _folder(path: Path, format: str) -> Seen:  # noqa: A002
    own = _known(path)
    known = own if format == "auto" else format
    if (not own or own != known) and (saves := numbered_folders(path)):
        seen = _folder(saves[-1], format)
        return seen._replace(why=seen.why and f"{saves[-1].name}: {seen.why}")
    if not known or known == "torch":
        why = "torch.save writes files, and it is a folder" if known else "its format is not known"
        return Seen("unread", "", why)
    cut = {"dcp": _cut_dcp, "accelerate": _cut_accelerate, "trainer": _cut_trainer, "safetensors": _cut_index}
    if why := cut[known](path):
        return Seen("torn", known, why)
    for below in files_below(path):
        if (one := archive_or_safetensors(below)) and (seen := _file(below, one)).state == "torn":
            return Seen("torn", known, f"{below.name}: {seen.why}")
    return Seen("whole", known)


def archive_or_safetensors(path: Path) -> str:
    """By name and first bytes; "" for any other file."""
    if path.suffix == ".safetensors":
        return "safetensors"
    with os.fdopen(open_regular(path), "rb") as file:
        return "torch" if file.read(2) == b"PK" and (path.suffix in SUFFIXES or path.suffix == ".pkl") else ""


def _cut_dcp(path: Path) -> str:
    if not (path / ".metadata").is_file():
        return "it has no .metadata, which is written last"
    return _older(path / ".metadata", path.glob("*.distcp"))


def _cut_accelerate(path: Path) -> str:
    last = path / RANDOM_STATES
    if not last.is_file():
        return f"it has no {RANDOM_STATES}, which is written last"
    own = [*path.glob("custom_checkpoint_*")]
    if why := _older(last, _saved(path, "*.safetensors", "*.bin", *_SHARDED)):
        return why
    return next(filter(None, (_older(one, [last]) for one in own)), "")


def _cut_trainer(path: Path) -> str:
    last = path / TRAINER_STATE
    if not last.is_file():
        return f"it has no {TRAINER_STATE}, which is written last"
    return _older(last, _saved(path, "*.safetensors", "*.bin", "optimizer.*", "scheduler.*", *_SHARDED))


def _saved(path: Path, *patterns: str) -> list[Path]:
    return [file for pattern in patterns for file in path.glob(pattern)]


def _cut_index(path: Path) -> str:
    indices = [*path.glob("*.safetensors.index.json")]
    return _older(indices[0], path.glob("*.safetensors")) if len(indices) == 1 else ""


def _older(last: Path, files: Iterable[Path]) -> str:
    """Why `last`, which is written after `files`, is not of the same save; "" where it is."""
    at = last.stat().st_mtime_ns
    newer = [file.name for file in files if file.stat().st_mtime_ns > at]
    return f"{newer[0]} is newer than {last.name}, which is written after it" if newer else ""


def files_below(path: Path) -> Iterable[Path]:
    """Regular files, links left out; of a file itself."""
    if path.is_dir() and not path.is_symlink():
        for folder, _, names in os.walk(path):
            found = (Path(folder, name) for name in sorted(names))
            yield from (one for one in found if stat.S_ISREG(one.lstat().st_mode))
    elif path.is_file() and not path.is_symlink():
        yield path
