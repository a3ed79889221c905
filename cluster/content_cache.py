"""Files and folders kept by the SHA-256 of what is in them: whole or not at all, for reading only, removed when nobody
uses them. The server and nodes keep the data of jobs so.

    SHA/content       a file, or a folder of files; nobody has the right to write them
    SHA/facts.json    {"sha256", "bytes", "files", "stamp"}
    SHA/lock          locked, shared, by each process that uses the content; its time is that of the last use
    from/WHERE-WHAT   the SHA that was found at a source: WHERE names the place, WHAT its version
    new-…, gone-…     what is being added or removed: no entry yet, or none any more

An entry gets its name by one rename, after all of it is on disk. What a process with enough rights (root, or a chmod of
its own user) changed in it nevertheless is noticed by times and inodes at its next use, and then by its hash.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.content_hash import Content, close, content_of, delete, stamp_of
from cluster.errors import FleetError, NotFound, UserError
from cluster.file_lock import hold
from cluster.paths import private_dir, write_durably, write_private

SHA = re.compile(r"[0-9a-f]{64}", re.ASCII)
SOURCE = re.compile(r"([0-9a-f]{16})-[0-9a-f]{16}", re.ASCII)
LEFT_OVER_S = 86_400.0
"""After so long, what a process that was killed had begun is removed."""
MOST_TOLD = 256


def source_key(place: str, version: str = "") -> str:
    """Names a place, and where there is a `version` what was found there."""
    where = hashlib.sha256(place.encode("utf-8", "replace")).hexdigest()[:16]
    return f"{where}-{hashlib.sha256(version.encode()).hexdigest()[:16]}" if version else where


class Contents:
    """Below `root`, which is made on first use. Several threads and processes may use it, also of several machines
    where the file system has locks.
    """

    def __init__(self, root: Path):
        self.root = root

    # -- looking

    def find(self, sha256: str) -> Content | None:
        """What is kept under that name, once nothing says that somebody changed it. That counts as a use."""
        if not (known := self._known(sha256)):
            return None
        if stamp_of(self._entry(sha256) / "content") != known.stamp and not self._still(sha256):
            self._take_away(sha256, wait=True)
            return None
        with suppress(OSError):
            os.utime(self._entry(sha256) / "lock")
        return known

    def found_at(self, key: str) -> str:
        """The SHA-256 of what was found at a source (see `source_key`), where it is kept; "" where not."""
        with suppress(OSError, UserError):
            sha256 = (self.root / "from" / key).read_text()
            return sha256 if SOURCE.fullmatch(key) and self._known(sha256) else ""
        return ""

    def keys(self) -> list[str]:
        """The first 16 digits of what is kept, and of where it came from: the newest uses first."""
        kept = [(_used_s(entry.path), entry.name) for entry in self._entries()]
        names = [name for _, name in sorted(kept, reverse=True)]
        keys, there = [name[:16] for name in names], set(names)
        with suppress(OSError):
            for path in (self.root / "from").iterdir():
                if (match := SOURCE.fullmatch(path.name)) and path.read_text() in there:
                    keys.append(match[1])
        return list(dict.fromkeys(keys))[:MOST_TOLD]

    @contextmanager
    def used(self, sha256: str) -> Iterator[tuple[Path, Path]]:
        """The content and its lock, which is held meanwhile: it is not removed. Raises NotFound."""
        lock = self._entry(sha256) / "lock"
        descriptor = hold(lock)
        if descriptor is None:
            raise NotFound(f"data {sha256[:12]}… is not on this node", "it is fetched again at the next start")
        try:
            with suppress(OSError):
                os.utime(lock)
            yield lock.with_name("content"), lock
        finally:
            os.close(descriptor)

    def _entry(self, sha256: str) -> Path:
        if not SHA.fullmatch(sha256):
            raise UserError(f"{sha256[:80]!r} is not a SHA-256", "64 hexadecimal digits name data")
        return self.root / sha256

    def _known(self, sha256: str) -> Content | None:
        try:
            told = json.loads((self._entry(sha256) / "facts.json").read_text())
            return Content(str(told["sha256"]), int(told["bytes"]), int(told["files"]), str(told["stamp"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _still(self, sha256: str) -> bool:
        """Whether the content is what its name says, though its times are others, as after a restored backup."""
        content = self._entry(sha256) / "content"
        try:
            found, stamp = content_of(content), stamp_of(content)
        except (UserError, OSError):
            return False
        if found.sha256 != sha256:
            return False
        self._write_facts(self._entry(sha256), found, stamp)
        return True

    def _entries(self) -> list["os.DirEntry[str]"]:
        try:
            with os.scandir(self.root) as found:
                return [entry for entry in found if SHA.fullmatch(entry.name) and _used_s(entry.path)]
        except FileNotFoundError:
            return []

    # -- adding

    def keep(self, source: Path, expected: str = "", came_from: str = "") -> Content:
        """Take `source`, a file or folder on this file system, and tell what it is. Where that is not `expected`,
        nothing is kept and the source is removed. Afterwards nobody has the right to write its files.
        """
        private_dir(self.root)
        aside = self.root / f"new-{uuid.uuid4().hex}"
        aside.mkdir(mode=0o700)
        try:
            if source.is_symlink():
                raise UserError(f"{source} is a link", "data holds no links")
            if source.is_dir():
                source.chmod(0o700)  # a folder is moved by who may write it
            content = aside / "content"
            source.rename(content)
            close(content)
            before = stamp_of(content)
            found = content_of(content)
            if expected in ("", found.sha256):
                if stamp_of(content) != before:
                    raise FleetError(f"data {found.sha256[:12]}… was changed while it was read", "it is fetched again")
                self._add(aside, found, before)
                self._remember(came_from, found.sha256)
            return found
        finally:
            delete(aside)

    def _add(self, aside: Path, found: Content, stamp: str) -> None:
        (aside / "lock").touch(0o600)
        self._write_facts(aside, found, stamp)
        write_durably(aside)
        if self.find(found.sha256) is None:
            with suppress(OSError):  # somebody else has just added the same
                aside.rename(self._entry(found.sha256))
            write_durably(self.root)
        if self._known(found.sha256) is None:
            raise FleetError(f"data {found.sha256[:12]}… could not be kept below {self.root}", "look at that folder")

    def _write_facts(self, folder: Path, found: Content, stamp: str) -> None:
        told = {"sha256": found.sha256, "bytes": found.bytes, "files": found.files, "stamp": stamp}
        write_private(folder / "facts.json", json.dumps(told))

    def _remember(self, key: str, sha256: str) -> None:
        if key and SOURCE.fullmatch(key):
            with suppress(OSError):
                write_private(private_dir(self.root / "from") / key, sha256)

    # -- removing

    def make_room(self, needed_bytes: int, most_bytes: int, free_bytes: int | None = None) -> None:
        """Remove what was not used for longest, and nobody uses now, until `needed_bytes` more are within `most_bytes`
        and on the disk. Raises UserError where they never can be, FleetError where too much is in use. `free_bytes`:
        what the disk has, looked at unless given.
        """
        if needed_bytes > most_bytes:
            sizes = f"{needed_bytes:,} bytes of data, and the cache may hold {most_bytes:,}"
            raise UserError(sizes, "split the data, or give the pool a larger cache")
        self._remove_left_over()
        private_dir(self.root)
        entries = sorted(self._entries(), key=lambda entry: _used_s(entry.path))
        sizes_of = {entry.name: known.bytes if (known := self._known(entry.name)) else 0 for entry in entries}
        total = sum(sizes_of.values())
        for sha256, size_bytes in sizes_of.items():
            if total + needed_bytes <= most_bytes and needed_bytes <= self._free(free_bytes):
                return
            if self._take_away(sha256):
                total -= size_bytes
                free_bytes = None if free_bytes is None else free_bytes + size_bytes
        if total + needed_bytes > most_bytes:
            told = f"{needed_bytes:,} bytes of data do not fit: living attempts use {total:,} of {most_bytes:,}"
            raise FleetError(told, "it is tried again; give the pool a larger cache")
        if needed_bytes > (free := self._free(free_bytes)):
            raise FleetError(
                f"{needed_bytes:,} bytes of data do not fit: {free:,} are free at {self.root}", "free space"
            )

    def _free(self, given: int | None) -> int:
        return shutil.disk_usage(self.root).free if given is None else given

    def remove_unused(self, named: set[str], idle_s: float) -> list[str]:
        """Entries that are not `named`, and that nobody used for `idle_s`."""
        self._remove_left_over()
        idle = [e.name for e in self._entries() if time.time() - _used_s(e.path) > idle_s]
        return [sha256 for sha256 in idle if sha256 not in named and self._take_away(sha256)]

    def drop(self, path: Path) -> None:
        """Remove what was to be an entry; an absent one is none to remove."""
        delete(path)

    def _take_away(self, sha256: str, *, wait: bool = False) -> bool:
        """Whether it is gone. Not while anybody uses it: with `wait` that is a FleetError."""
        entry = self._entry(sha256)
        gone = entry.with_name(f"gone-{uuid.uuid4().hex}")
        try:
            descriptor = os.open(entry / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            entry.rename(gone)
        except OSError:
            if wait:
                told = f"data {sha256[:12]}… was changed by a job, and another one uses it still"
                raise FleetError(told, "it is fetched again once that has ended") from None
            return False
        finally:
            os.close(descriptor)
        delete(gone)
        return True

    def _remove_left_over(self) -> None:
        """What a process that was killed was adding or removing."""
        with suppress(OSError):
            for path in [*self.root.glob("new-*"), *self.root.glob("gone-*")]:
                if path.name.startswith("gone-") or time.time() - path.stat().st_mtime > LEFT_OVER_S:
                    delete(path)


def _used_s(entry: str) -> float:
    """When it was used last, by the wall clock; 0 for what is none."""
    with suppress(OSError):
        return Path(entry, "lock").stat().st_mtime
    return 0.0
