"""Check whether a script's save is complete. An interrupted save must never be passed on as a checkpoint.

How each format shows that it is complete:

    torch         a zip archive: its list of entries is written last, and every entry has a CRC
    safetensors   its header contains the length of the file
    dcp           `.metadata` is written last: it exists, and no data file is newer
    accelerate    `random_states_0.pkl` is written after model and optimizer, the user's own objects after that
    trainer       `trainer_state.json` is written after model and optimizer

A folder is complete if each of its files is, too. In a folder with several saves (`checkpoint-500`, `checkpoint-1000`)
the newest is checked, because its program resumes from that one. Anything else cannot be checked and is `unread`.
"""

import os
import stat
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple

from cluster.input import sandbox
from cluster.input.untrusted_files import UnreadableFile, parse_json
from workers.checkpoint.exchange.pickles.torch_archive import UNREADABLE
from workers.checkpoint.exchange.sources.folders import RANDOM_STATES, TRAINER_STATE, numbered_folders
from workers.checkpoint.exchange.sources.formats import SUFFIXES, format_of
from workers.checkpoint.exchange.sources.safetensors_files import MAX_HEADER_BYTES
from workers.checkpoint.format.manifest_checks import open_regular
from workers.errors import CheckpointError

READ_BYTES = 4 << 20
MIN_BYTES = 4
"""Minimum size of a file in any format: the format is detected from these bytes."""
_SHARDED = ("*/.metadata", "*/*.distcp")
"""Patterns of DCP folders inside it, as FSDP writes them."""
FILES = ("torch", "safetensors")
"""Formats of single files; all but `torch` may also be folders."""


class Completeness(NamedTuple):
    """Result of a check. `state` is "absent", "torn", "whole" (complete), or "unread" (cannot be checked). `why` has
    the reason.
    """

    state: str
    format: str = ""
    why: str = ""


def check(path: Path, format: str = "auto") -> Completeness:  # noqa: A002
    """Check a file or folder; reads all of it."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return Completeness("absent")
    if stat.S_ISDIR(mode):
        return _folder(path, format) if any(files_below(path)) else Completeness("absent")
    if not stat.S_ISREG(mode):
        return Completeness("unread", "", "it is neither a file nor a folder")
    if (size_bytes := path.stat().st_size) < MIN_BYTES:
        return Completeness("torn", "", f"it has {size_bytes} bytes")
    format_name = _detect_format(path) if format == "auto" else format
    if format_name not in FILES:
        return Completeness(
            "unread",
            "",
            f"{format_name} writes folders, and it is a file" if format_name else "its format is unknown",
        )
    return _file(path, format_name)


def _detect_format(path: Path) -> str:
    try:
        if path.is_dir() and not (path / ".metadata").is_file() and any(path.glob("*.distcp")):
            return "dcp"
        return format_of(path)
    except CheckpointError:
        return ""


def _file(path: Path, format_name: str) -> Completeness:
    sandbox.raise_limits(data_bytes=path.stat().st_size)
    with os.fdopen(open_regular(path), "rb") as file:
        if format_name == "torch" and file.read(2) != b"PK":
            return Completeness(
                "unread", format_name, "it is not a zip archive, which torch.save writes since torch 1.6"
            )
        reason = (_archive_fault if format_name == "torch" else _safetensors_fault)(file)
    return Completeness("torn" if reason else "whole", format_name, reason)


def _archive_fault(file: IO[bytes]) -> str:
    """Check every entry against its CRC; return the reason if one does not match."""
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                with archive.open(info) as entry:
                    while entry.read(READ_BYTES):
                        continue
    except UNREADABLE as e:
        return f"it was not written completely, or has changed: {e!s:.200}"
    return ""


def _safetensors_fault(file: IO[bytes]) -> str:
    file.seek(0)
    head, size_bytes = file.read(8), os.fstat(file.fileno()).st_size
    header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
    if not 0 < header_bytes <= min(size_bytes - 8, MAX_HEADER_BYTES):
        return "it ends within its header"
    sandbox.raise_limits(metadata_bytes=header_bytes)
    try:
        header = parse_json(file.read(header_bytes), "the header")
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected_bytes = 8 + header_bytes + max(ends, default=0)
    except (UnreadableFile, AttributeError, KeyError, IndexError, TypeError) as e:
        return f"its header is not valid: {e!s:.200}"
    return "" if expected_bytes == size_bytes else f"it has {size_bytes} bytes, its header says {expected_bytes}"


def _folder(path: Path, format: str) -> Completeness:  # noqa: A002
    own = _detect_format(path)
    format_name = own if format == "auto" else format
    if (not own or own != format_name) and (saves := numbered_folders(path)):
        result = _folder(saves[-1], format)
        return result._replace(why=result.why and f"{saves[-1].name}: {result.why}")
    if not format_name or format_name == "torch":
        reason = "torch.save writes files, and it is a folder" if format_name else "its format is unknown"
        return Completeness("unread", "", reason)
    checks = {
        "dcp": _dcp_fault,
        "accelerate": _accelerate_fault,
        "trainer": _trainer_fault,
        "safetensors": _index_fault,
    }
    if reason := checks[format_name](path):
        return Completeness("torn", format_name, reason)
    for below in files_below(path):
        if (file_format := archive_or_safetensors(below)) and (result := _file(below, file_format)).state == "torn":
            return Completeness("torn", format_name, f"{below.name}: {result.why}")
    return Completeness("whole", format_name)


def archive_or_safetensors(path: Path) -> str:
    """Detect the format from name and first bytes; "" for any other file."""
    if path.suffix == ".safetensors":
        return "safetensors"
    with os.fdopen(open_regular(path), "rb") as file:
        return "torch" if file.read(2) == b"PK" and (path.suffix in SUFFIXES or path.suffix == ".pkl") else ""


def _dcp_fault(path: Path) -> str:
    if not (path / ".metadata").is_file():
        return "it has no .metadata, which is written last"
    return _order_fault(path / ".metadata", path.glob("*.distcp"))


def _accelerate_fault(path: Path) -> str:
    last = path / RANDOM_STATES
    if not last.is_file():
        return f"it has no {RANDOM_STATES}, which is written last"
    own = [*path.glob("custom_checkpoint_*")]
    if reason := _order_fault(last, _glob_all(path, "*.safetensors", "*.bin", *_SHARDED)):
        return reason
    return next(filter(None, (_order_fault(file, [last]) for file in own)), "")


def _trainer_fault(path: Path) -> str:
    last = path / TRAINER_STATE
    if not last.is_file():
        return f"it has no {TRAINER_STATE}, which is written last"
    return _order_fault(last, _glob_all(path, "*.safetensors", "*.bin", "optimizer.*", "scheduler.*", *_SHARDED))


def _glob_all(path: Path, *patterns: str) -> list[Path]:
    return [file for pattern in patterns for file in path.glob(pattern)]


def _index_fault(path: Path) -> str:
    indices = [*path.glob("*.safetensors.index.json")]
    return _order_fault(indices[0], path.glob("*.safetensors")) if len(indices) == 1 else ""


def _order_fault(last: Path, files: Iterable[Path]) -> str:
    """Return why `last`, which is written after `files`, is not of the same save; "" if it is."""
    at = last.stat().st_mtime_ns
    newer = [file.name for file in files if file.stat().st_mtime_ns > at]
    return f"{newer[0]} is newer than {last.name}, which is written after it" if newer else ""


def files_below(path: Path) -> Iterable[Path]:
    """Yield the regular files of a folder, without links; for a file, the file itself."""
    if path.is_dir() and not path.is_symlink():
        for folder, _, names in os.walk(path):
            files = (Path(folder, name) for name in sorted(names))
            yield from (file for file in files if stat.S_ISREG(file.lstat().st_mode))
    elif path.is_file() and not path.is_symlink():
        yield path
