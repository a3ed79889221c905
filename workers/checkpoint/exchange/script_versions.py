"""Keep the last complete version of a script's checkpoint, and choose what the next attempt gets.

    ckpt.pt                             the script's own file or folder, which it may overwrite in place
    .polyfleet/checkpoint-N/ckpt.pt     a copy that was read back and is complete; the highest N is used
    ckpt.pt.torn                        what an interrupted save left, renamed

A copy is complete once its folder has its final name. All of this is in the job's folder of files, and moves with it.
"""

import errno
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.input import sandbox
from cluster.paths import write_durably
from workers.checkpoint.exchange.change_stamps import inside, stamp
from workers.checkpoint.exchange.completeness import Completeness, archive_or_safetensors, check, files_below
from workers.checkpoint.exchange.device_remap import Loads, loads_on, to_cpu
from workers.checkpoint.exchange.pickles.pickle_size_estimate import Unsound
from workers.protocol.messages import OWN_FOLDER

VERSION_FOLDER = re.compile(r"checkpoint-([0-9]{1,12})", re.ASCII)
PART = "part"
TORN = ".torn"
COPY_BYTES = 64 << 20
"""Bytes copied at a time; the kernel copies, and shares the blocks if the file system can."""


def keep(folder: str, path: str, format: str) -> dict[str, Any]:  # noqa: A002
    """Copy `path` in a job's `folder` if it is complete and does not change during the copy: {"kept", "why"}."""
    store = _Store(Path(folder), path, format)
    stamp_before = stamp(store.target)
    if not stamp_before or stamp_before == stamp(store.last_version()):
        return {"kept": False, "why": "this version was copied before" if stamp_before else "it does not exist"}
    copy = store.stage(store.target)
    result = check(copy, format)
    if result.state != "whole" or stamp(store.target) != stamp_before:
        store.clear()
        return {"kept": False, "why": result.why or f"it is {result.state}, or changed during the copy"}
    store.commit()
    return {"kept": True, "why": ""}


def hand_on(folder: str, path: str, format: str, device: str, count: int) -> dict[str, Any]:  # noqa: A002
    """Prepare `path` in an attempt's `folder` before it starts, for `count` devices of torch's `device`.
    It becomes the version to resume from: {"found", "text"}; `text` describes for users what was done. No other process
    may write there.
    """
    store = _Store(Path(folder), path, format)
    store.clear()
    result, last_version = check(store.target, format), store.last_version()
    if result.state == "unread":
        return _result(True, f"{path} is passed on without a check: {result.why}")
    usable = result if result.state == "whole" else check(last_version, format) if last_version else result
    if usable.state != "whole":
        return _result(False, store.no_version_text(result))
    source = store.target if result.state == "whole" else last_version
    assert source is not None
    moved, notes = _devices(source, loads_on(device, count), change=False)
    if source == store.target and not moved:
        return _result(True, f"{path} ({usable.format}) is complete", *notes, *store.copy_target())
    saved_at = _saved_at(source)
    _devices(store.stage(source), loads_on(device, count), change=True)
    store.commit()
    if result.state != "whole":
        store.rename_torn_target()
    store.replace_target()
    if source == last_version:
        reason = f"{path} was half written ({result.why})" if result.why else f"{path} was missing"
        return _result(
            True, f"{reason}; restored its last complete version, of {saved_at}", *_move_texts(moved), *notes
        )
    return _result(True, f"{path} ({usable.format}) is complete", *_move_texts(moved), *notes)


def _result(is_usable: bool, *parts: str) -> dict[str, Any]:
    return {"found": is_usable, "text": "; ".join(parts)}


def _saved_at(path: Path) -> str:
    at_s = max(file.stat().st_mtime for file in files_below(path))
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _move_texts(moved: Counter[str]) -> list[str]:
    return [f"its {count} tensors of {device} are on the CPU now" for device, count in sorted(moved.items())]


def _devices(path: Path, loads: Loads, *, change: bool) -> tuple[Counter[str], list[str]]:
    """Move tensors of unavailable devices to the CPU.
    Returns their number by device, and a note for each file that could not be changed.
    """
    moved, notes = Counter[str](), []
    for file in files_below(path):
        if archive_or_safetensors(file) == "torch":
            try:
                moved += to_cpu(file, loads, change=change)
            except Unsound as e:
                notes.append(f"{file.name[:80]!r} still names its devices, because its pickle {e}")
    return moved, notes[:3]


class _Store:
    """Versions of one job's checkpoint. Raises CheckpointError for a path that leads through a link."""

    def __init__(self, folder: Path, path: str, format: str):  # noqa: A002
        self.target, self._path, self._format = inside(folder, path), path, format
        self._own_folder = inside(folder, OWN_FOLDER)
        self._part = self._own_folder / PART
        self._staged = self._part / self.target.name

    def last_version(self) -> Path | None:
        """Return the last complete version, or None."""
        return next((version / self.target.name for _, version in sorted(self._versions(), reverse=True)), None)

    def _versions(self) -> Iterator[tuple[int, Path]]:
        with suppress(FileNotFoundError):
            for entry in os.scandir(self._own_folder):
                match = VERSION_FOLDER.fullmatch(entry.name)
                if match and entry.is_dir(follow_symlinks=False):
                    yield int(match[1]), Path(entry.path)

    def clear(self) -> None:
        _remove(self._part)

    def stage(self, source: Path) -> Path:
        """Copy `source` to a temporary folder. `commit` makes the copy a version."""
        self.clear()
        self._part.mkdir(mode=0o700, parents=True)
        _copy(source, self._staged)
        return self._staged

    def commit(self) -> None:
        """Make the staged copy the last complete version, and remove older ones."""
        versions = dict(self._versions())
        write_durably(self._part)
        self._part.rename(self._own_folder / f"checkpoint-{max(versions, default=0) + 1}")
        write_durably(self._own_folder)
        for older in versions.values():
            _remove(older)

    def copy_target(self) -> list[str]:
        """Copy the target, so that the next attempt's first save cannot destroy the only version. Returns notes."""
        if stamp(self.target) == stamp(self.last_version()):
            return []
        try:
            self.stage(self.target)
            self.commit()
        except OSError as e:
            self.clear()
            return [f"it could not be copied: {e.strerror}"]
        return []

    def rename_torn_target(self) -> None:
        if os.path.lexists(self.target):
            torn_path = self.target.with_name(f"{self.target.name}{TORN}")
            _remove(torn_path)
            self.target.rename(torn_path)

    def replace_target(self) -> None:
        """Replace the target by a copy of the last complete version; for a file, atomically."""
        version = self.last_version()
        assert version is not None
        self.target.parent.mkdir(parents=True, exist_ok=True)
        copy = self.stage(version)
        if copy.is_dir():
            _remove(self.target)
        copy.rename(self.target)
        write_durably(self.target.parent)
        self.clear()

    def no_version_text(self, result: Completeness) -> str:
        """Describe that there is nothing to resume from, and rename an unusable target."""
        if result.state == "absent":
            return f"{self._path} does not exist; the script starts from the beginning"
        self.rename_torn_target()
        torn_path = f"{self._path}{TORN}"
        return (
            f"{self._path} was half written ({result.why}) and was moved to {torn_path}; there is no complete version"
        )


def _copy(source: Path, target: Path) -> None:
    """Copy a file, or a folder with its files, with times, because they show which file was written last."""
    for file in files_below(source):
        copy = target / file.relative_to(source) if source.is_dir() else target
        copy.parent.mkdir(parents=True, exist_ok=True)
        _copy_file(file, copy)
        if source.is_dir():
            write_durably(copy.parent)


def _copy_file(source: Path, target: Path) -> None:
    status = source.stat()
    sandbox.raise_limits(data_bytes=3 * status.st_size, file_bytes=status.st_size + COPY_BYTES)
    source_fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    target_fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            while os.copy_file_range(source_fd, target_fd, COPY_BYTES):
                continue
        except (AttributeError, OSError) as e:
            if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
                raise
            os.lseek(source_fd, 0, os.SEEK_SET)
            with os.fdopen(os.dup(source_fd), "rb") as source_file, os.fdopen(os.dup(target_fd), "wb") as target_file:
                target_file.seek(0)
                shutil.copyfileobj(source_file, target_file)
        os.fchmod(target_fd, status.st_mode & 0o777 | 0o600)
        os.utime(target_fd, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.fsync(target_fd)
    finally:
        os.close(source_fd)
        os.close(target_fd)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
