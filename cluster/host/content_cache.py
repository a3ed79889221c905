"""Content-addressed cache of files and folders by SHA-256.

The server and nodes store the data of jobs in it. Entries are added atomically, are read-only, and are removed when
they are not in use.

    SHA/content       a file, or a folder of files, without write permission
    SHA/facts.json    {"sha256", "bytes", "files", "stamp"}
    SHA/lock          shared lock of each process that uses the content; its time is that of the last use
    from/WHERE-WHAT   the SHA of a source's content: WHERE is the hash of the location, WHAT that of its version
    new-…, gone-…     entries that are being added or removed

An entry gets its name by one rename, after all of it is on disk. A process with enough rights (root, or a chmod of the
same user) can still change it; that is detected at the next use by times and inodes, and then by the hash.
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

from cluster.errors import FleetError, NotFound, UserError
from cluster.host.content_hash import Content, content_of, delete, make_read_only, stamp_of
from cluster.host.file_lock import share_lock
from cluster.paths import private_dir, write_durably, write_private

SHA = re.compile(r"[0-9a-f]{64}", re.ASCII)
SOURCE = re.compile(r"([0-9a-f]{16})-[0-9a-f]{16}", re.ASCII)
UNFINISHED_S = 86_400.0
"""Age at which an unfinished entry, of a process that was killed, is removed."""
MAX_REPORTED = 256


def source_key(location: str, version: str = "") -> str:
    """Return the key of a location, or, with a `version`, of the content there."""
    location_key = hashlib.sha256(location.encode("utf-8", "replace")).hexdigest()[:16]
    return f"{location_key}-{hashlib.sha256(version.encode()).hexdigest()[:16]}" if version else location_key


class ContentCache:
    """The cache in the folder `root`, which is created on first use.

    Safe for several threads and processes, also on several machines if the file system has locks.
    """

    def __init__(self, root: Path):
        self.root = root

    # -- looking

    def find(self, sha256: str) -> Content | None:
        """Return the entry of that hash, or None if there is none or it was changed. Counts as a use."""
        if not (stored := self._read_facts(sha256)):
            return None
        if stamp_of(self._entry(sha256) / "content") != stored.stamp and not self._is_unchanged(sha256):
            self._remove_entry(sha256, wait=True)
            return None
        with suppress(OSError):
            os.utime(self._entry(sha256) / "lock")
        return stored

    def source_sha256(self, key: str) -> str:
        """Return the SHA-256 of a source's content (see `source_key`) if it is in the cache, else ""."""
        with suppress(OSError, UserError):
            sha256 = (self.root / "from" / key).read_text()
            return sha256 if SOURCE.fullmatch(key) and self._read_facts(sha256) else ""
        return ""

    def keys(self) -> list[str]:
        """Return the first 16 digits of the entries' hashes, latest use first, then of their sources' hashes."""
        uses = [(_last_used_s(entry.path), entry.name) for entry in self._entries()]
        names = [name for _, name in sorted(uses, reverse=True)]
        keys, stored = [name[:16] for name in names], set(names)
        with suppress(OSError):
            for path in (self.root / "from").iterdir():
                if (match := SOURCE.fullmatch(path.name)) and path.read_text() in stored:
                    keys.append(match[1])
        return list(dict.fromkeys(keys))[:MAX_REPORTED]

    @contextmanager
    def use(self, sha256: str) -> Iterator[tuple[Path, Path]]:
        """Yield the content and its lock, which this holds, so that the entry is not removed. Raises NotFound."""
        lock = self._entry(sha256) / "lock"
        descriptor = share_lock(lock)
        if descriptor is None:
            raise NotFound(
                f"data {sha256[:12]}… is not on this node", "nothing to do: the node fetches it again at the next start"
            )
        try:
            with suppress(OSError):
                os.utime(lock)
            yield lock.with_name("content"), lock
        finally:
            os.close(descriptor)

    def _entry(self, sha256: str) -> Path:
        if not SHA.fullmatch(sha256):
            raise UserError(f"{sha256[:80]!r} is not a SHA-256", "write 64 hexadecimal digits")
        return self.root / sha256

    def _read_facts(self, sha256: str) -> Content | None:
        try:
            facts = json.loads((self._entry(sha256) / "facts.json").read_text())
            return Content(str(facts["sha256"]), int(facts["bytes"]), int(facts["files"]), str(facts["stamp"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _is_unchanged(self, sha256: str) -> bool:
        """Return whether the content still has its hash although its times differ, as after a restored backup.

        If so, the new times are recorded.
        """
        content = self._entry(sha256) / "content"
        try:
            actual, stamp = content_of(content), stamp_of(content)
        except (UserError, OSError):
            return False
        if actual.sha256 != sha256:
            return False
        self._write_facts(self._entry(sha256), actual, stamp)
        return True

    def _entries(self) -> list["os.DirEntry[str]"]:
        try:
            with os.scandir(self.root) as entries:
                return [entry for entry in entries if SHA.fullmatch(entry.name) and _last_used_s(entry.path)]
        except FileNotFoundError:
            return []

    # -- adding

    def add(self, source: Path, expected: str = "", key: str = "") -> Content:
        """Move `source`, a file or folder on this file system, into the cache; returns its hash and size.

        Afterwards it is read-only. If its hash is not `expected`, the source is removed and nothing is added.
        `key` is the key of its source (see `source_key`).
        """
        private_dir(self.root)
        staging = self.root / f"new-{uuid.uuid4().hex}"
        staging.mkdir(mode=0o700)
        try:
            if source.is_symlink():
                raise UserError(f"{source} is a link", "data must not contain links")
            if source.is_dir():
                source.chmod(0o700)  # moving a folder needs write permission for it
            content = staging / "content"
            source.rename(content)
            make_read_only(content)
            old_stamp = stamp_of(content)
            content_facts = content_of(content)
            if expected in ("", content_facts.sha256):
                if stamp_of(content) != old_stamp:
                    raise FleetError(
                        f"data {content_facts.sha256[:12]}… was changed while it was read",
                        "nothing to do: it is fetched again",
                    )
                self._publish(staging, content_facts, old_stamp)
                self._record_source(key, content_facts.sha256)
            return content_facts
        finally:
            delete(staging)

    def _publish(self, staging: Path, content_facts: Content, stamp: str) -> None:
        (staging / "lock").touch(0o600)
        self._write_facts(staging, content_facts, stamp)
        write_durably(staging)
        if self.find(content_facts.sha256) is None:
            with suppress(OSError):  # another process has just added the same
                staging.rename(self._entry(content_facts.sha256))
            write_durably(self.root)
        if self._read_facts(content_facts.sha256) is None:
            raise FleetError(
                f"data {content_facts.sha256[:12]}… could not be stored in {self.root}",
                "check the permissions and the disk of that folder",
            )

    def _write_facts(self, folder: Path, content: Content, stamp: str) -> None:
        facts = {"sha256": content.sha256, "bytes": content.bytes, "files": content.files, "stamp": stamp}
        write_private(folder / "facts.json", json.dumps(facts))

    def _record_source(self, key: str, sha256: str) -> None:
        if key and SOURCE.fullmatch(key):
            with suppress(OSError):
                write_private(private_dir(self.root / "from") / key, sha256)

    # -- removing

    def free_space(self, needed_bytes: int, limit_bytes: int, free_bytes: int | None = None) -> None:
        """Remove entries that are not in use, least recently used first, until `needed_bytes` more fit.

        The limit of the cache is `limit_bytes`. The disk must have the space; `free_bytes` is its free space (default:
        read from the system). Raises UserError if `needed_bytes` can never fit, FleetError if too much is in use.
        """
        if needed_bytes > limit_bytes:
            sizes = f"the data has {needed_bytes:,} bytes; the cache is limited to {limit_bytes:,}"
            raise UserError(sizes, "split the data, or give the pool a larger cache")
        self._remove_unfinished()
        private_dir(self.root)
        entries = sorted(self._entries(), key=lambda entry: _last_used_s(entry.path))
        sizes_of = {entry.name: stored.bytes if (stored := self._read_facts(entry.name)) else 0 for entry in entries}
        total = sum(sizes_of.values())
        for sha256, size_bytes in sizes_of.items():
            if total + needed_bytes <= limit_bytes and needed_bytes <= self._free_bytes(free_bytes):
                return
            if self._remove_entry(sha256):
                total -= size_bytes
                free_bytes = None if free_bytes is None else free_bytes + size_bytes
        if total + needed_bytes > limit_bytes:
            message = f"{needed_bytes:,} bytes of data do not fit: running attempts use {total:,} of {limit_bytes:,}"
            raise FleetError(message, "give the pool a larger cache, or wait: the start is retried")
        if needed_bytes > (free := self._free_bytes(free_bytes)):
            raise FleetError(
                f"{needed_bytes:,} bytes of data do not fit: {free:,} are free at {self.root}", "free disk space there"
            )

    def _free_bytes(self, free_bytes: int | None) -> int:
        return shutil.disk_usage(self.root).free if free_bytes is None else free_bytes

    def remove_unused(self, named: set[str], idle_s: float) -> list[str]:
        """Remove entries that are not `named` and were not used for `idle_s`. Returns their hashes."""
        self._remove_unfinished()
        idle = [e.name for e in self._entries() if time.time() - _last_used_s(e.path) > idle_s]
        return [sha256 for sha256 in idle if sha256 not in named and self._remove_entry(sha256)]

    def discard(self, path: Path) -> None:
        """Remove a path that was to become an entry, if it exists."""
        delete(path)

    def _remove_entry(self, sha256: str, *, wait: bool = False) -> bool:
        """Remove an entry that is not in use; returns whether it was removed.

        With `wait`, raises FleetError instead.
        """
        entry = self._entry(sha256)
        removed = entry.with_name(f"gone-{uuid.uuid4().hex}")
        try:
            descriptor = os.open(entry / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            entry.rename(removed)
        except OSError:
            if wait:
                message = f"data {sha256[:12]}… was changed by a job, and another job still uses it"
                raise FleetError(message, "nothing to do: it is fetched again when that job has ended") from None
            return False
        finally:
            os.close(descriptor)
        delete(removed)
        return True

    def _remove_unfinished(self) -> None:
        """Remove unfinished entries of processes that were killed."""
        with suppress(OSError):
            for path in [*self.root.glob("new-*"), *self.root.glob("gone-*")]:
                if path.name.startswith("gone-") or time.time() - path.stat().st_mtime > UNFINISHED_S:
                    delete(path)


def _last_used_s(entry: str) -> float:
    """Return the time of an entry's last use, by the wall clock; 0 if it is not an entry."""
    with suppress(OSError):
        return Path(entry, "lock").stat().st_mtime
    return 0.0
