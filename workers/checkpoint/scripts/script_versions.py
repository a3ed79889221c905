"""The last whole version of a script's checkpoint, kept beside it, and what the next attempt is given.

    ckpt.pt                             the script's own file or folder, which it may write over in place
    .polyfleet/checkpoint-N/ckpt.pt     a copy of it that was read back and found whole; the highest N counts
    ckpt.pt.torn                        what a save that was cut off left, put aside

A copy counts once its folder was renamed to its place. All of it lies in the job's folder of files, and follows it.
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

from cluster import sandbox
from cluster.paths import write_durably
from workers.checkpoint.exchange.pickle_size_estimate import Unsound
from workers.checkpoint.scripts.change_stamps import inside, stamp
from workers.checkpoint.scripts.completeness import Seen, archive_or_safetensors, files_below, look
from workers.checkpoint.scripts.device_remap import Loads, loads_on, to_cpu
from workers.messages import OWN_FOLDER

KEPT = re.compile(r"checkpoint-([0-9]{1,12})", re.ASCII)
PART = "part"
TORN = ".torn"
COPY_BYTES = 64 << 20
"""At a time; the kernel copies, and shares the blocks where the file system can."""


def keep(folder: str, path: str, format: str) -> dict[str, Any]:  # noqa: A002
    """Copy what lies at `path` in a job's `folder`, if it is whole and stays as it is meanwhile: {"kept", "why"}."""
    store = _Store(Path(folder), path, format)
    before = stamp(store.target)
    if not before or before == stamp(store.kept()):
        return {"kept": False, "why": "it is kept already" if before else "it is not there"}
    staged = store.stage(store.target)
    seen = look(staged, format)
    if seen.state != "whole" or stamp(store.target) != before:
        store.clear()
        return {"kept": False, "why": seen.why or f"it is {seen.state}, or changes"}
    store.commit()
    return {"kept": True, "why": ""}


def hand_on(folder: str, path: str, format: str, device: str, count: int) -> dict[str, Any]:  # noqa: A002
    """Make `path` in the `folder` of an attempt that has not begun what it should resume from, on so many of torch's
    `device`: {"found", "text"}. `text` says what was done, for people. No other process writes there.
    """
    store = _Store(Path(folder), path, format)
    store.clear()
    seen, kept = look(store.target, format), store.kept()
    if seen.state == "unread":
        return _told(True, f"{path} is carried on unread: {seen.why}")
    whole = seen if seen.state == "whole" else look(kept, format) if kept else seen
    if whole.state != "whole":
        return _told(False, store.without(seen))
    source = store.target if seen.state == "whole" else kept
    assert source is not None
    moved, left = _devices(source, loads_on(device, count), change=False)
    if source == store.target and not moved:
        return _told(True, f"{path} ({whole.format}) is whole", *left, *store.kept_again())
    when = _when(source)
    _devices(store.stage(source), loads_on(device, count), change=True)
    store.commit()
    if seen.state != "whole":
        store.put_aside()
    store.replace_target()
    if source == kept:
        lost = f"what was at {path} was half written ({seen.why})" if seen.why else f"{path} was gone"
        return _told(True, f"{lost}; its last whole version, of {when}, is in its place", *_moves(moved), *left)
    return _told(True, f"{path} ({whole.format}) is whole", *_moves(moved), *left)


def _told(found: bool, *parts: str) -> dict[str, Any]:
    return {"found": found, "text": "; ".join(parts)}


def _when(path: Path) -> str:
    at_s = max(one.stat().st_mtime for one in files_below(path))
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _moves(moved: Counter[str]) -> list[str]:
    return [f"its {count} tensors of {device} are on the CPU now" for device, count in sorted(moved.items())]


def _devices(path: Path, loads: Loads, *, change: bool) -> tuple[Counter[str], list[str]]:
    """Tensors by device that go to the CPU, and what stays as it is, with the reason."""
    moved, left = Counter[str](), []
    for file in files_below(path):
        if archive_or_safetensors(file) == "torch":
            try:
                moved += to_cpu(file, loads, change=change)
            except Unsound as e:
                left.append(f"{file.name[:80]!r} keeps the devices that it names, since its pickle {e}")
    return moved, left[:3]


class _Store:
    """Of one job's folder. Raises CheckpointError for a path that leads through a link."""

    def __init__(self, folder: Path, path: str, format: str):  # noqa: A002
        self.target, self._path, self._format = inside(folder, path), path, format
        self._ours = inside(folder, OWN_FOLDER)
        self._part = self._ours / PART
        self._staged = self._part / self.target.name

    def kept(self) -> Path | None:
        """The last whole version."""
        return next((one / self.target.name for _, one in sorted(self._versions(), reverse=True)), None)

    def _versions(self) -> Iterator[tuple[int, Path]]:
        with suppress(FileNotFoundError):
            for entry in os.scandir(self._ours):
                match = KEPT.fullmatch(entry.name)
                if match and entry.is_dir(follow_symlinks=False):
                    yield int(match[1]), Path(entry.path)

    def clear(self) -> None:
        _remove(self._part)

    def stage(self, source: Path) -> Path:
        """A copy that does not count yet."""
        self.clear()
        self._part.mkdir(mode=0o700, parents=True)
        _copy(source, self._staged)
        return self._staged

    def commit(self) -> None:
        """What is staged is the last whole version."""
        before = dict(self._versions())
        write_durably(self._part)
        self._part.rename(self._ours / f"checkpoint-{max(before, default=0) + 1}")
        write_durably(self._ours)
        for older in before.values():
            _remove(older)

    def kept_again(self) -> list[str]:
        """So that the first save of the next attempt cannot destroy the only version there is."""
        if stamp(self.target) == stamp(self.kept()):
            return []
        try:
            self.stage(self.target)
            self.commit()
        except OSError as e:
            self.clear()
            return [f"no copy of it could be kept: {e.strerror}"]
        return []

    def put_aside(self) -> None:
        if os.path.lexists(self.target):
            aside = self.target.with_name(f"{self.target.name}{TORN}")
            _remove(aside)
            self.target.rename(aside)

    def replace_target(self) -> None:
        """By a copy of the last whole version, at once if it is a file."""
        kept = self.kept()
        assert kept is not None
        self.target.parent.mkdir(parents=True, exist_ok=True)
        staged = self.stage(kept)
        if staged.is_dir():
            _remove(self.target)
        staged.rename(self.target)
        write_durably(self.target.parent)
        self.clear()

    def without(self, seen: Seen) -> str:
        """There is nothing to resume from."""
        if seen.state == "absent":
            return f"no {self._path} was left; the script starts from its beginning"
        self.put_aside()
        aside = f"{self._path}{TORN}"
        return f"{self._path} was half written ({seen.why}) and lies at {aside} now; no whole version of it is known"


def _copy(source: Path, target: Path) -> None:
    """A file, or a folder with its files; times stay, since they tell which file was written last."""
    for file in files_below(source):
        there = target / file.relative_to(source) if source.is_dir() else target
        there.parent.mkdir(parents=True, exist_ok=True)
        _copy_file(file, there)
        if source.is_dir():
            write_durably(there.parent)


def _copy_file(source: Path, target: Path) -> None:
    found = source.stat()
    sandbox.raise_limits(data_bytes=3 * found.st_size, file_bytes=found.st_size + COPY_BYTES)
    reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            while os.copy_file_range(reading, writing, COPY_BYTES):
                continue
        except (AttributeError, OSError) as e:
            if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
                raise
            os.lseek(reading, 0, os.SEEK_SET)
            with os.fdopen(os.dup(reading), "rb") as one, os.fdopen(os.dup(writing), "wb") as other:
                other.seek(0)
                shutil.copyfileobj(one, other)
        os.fchmod(writing, found.st_mode & 0o777 | 0o600)
        os.utime(writing, ns=(found.st_atime_ns, found.st_mtime_ns))
        os.fsync(writing)
    finally:
        os.close(reading)
        os.close(writing)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
