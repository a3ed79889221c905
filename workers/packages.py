"""Submitted folders on a node: zip archives by the SHA-256 of their bytes, checked before any file is written.

An archive comes from a user, so nothing in it is believed: it is refused as a whole for a name, type, size or count in
its directory, and while unpacking no more bytes are written than were announced.
"""

import hashlib
import os
import re
import shutil
import stat
import threading
import unicodedata
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from cluster.errors import Conflict, NotFound, UserError
from cluster.paths import private_dir

LARGEST_ARCHIVE_BYTES = 512 << 20
LARGEST_CONTENT_BYTES = 8 << 30
MOST_ENTRIES = 50_000
HIGHEST_RATIO = 200
RATIO_FROM_BYTES = 16 << 20
LONGEST_NAME_BYTES = 1024
LONGEST_PART_BYTES = 255
COPY_BYTES = 1 << 20
DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]|^[A-Za-z]:")
KNOWN_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
ENCRYPTED = 0x1


class Packages:
    """Archives under `folder`; safe to use from several threads."""

    def __init__(self, folder: Path):
        self._folder = private_dir(folder)
        self._lock = threading.Lock()

    def has(self, sha: str) -> bool:
        return self._path(sha).is_file()

    def put(self, sha: str, offset: int, data: bytes, last: bool) -> None:
        """Append one piece. After the last one the digest is checked, and what the archive says it holds.

        Raises Conflict when a piece does not follow the one before, UserError for a wrong digest or a hostile archive.
        """
        with self._lock:
            if self.has(sha):
                return
            part = self._folder / f".incoming-{sha}"
            self._append(part, offset, data)
            if last:
                self._commit(part, sha)

    def _append(self, part: Path, offset: int, data: bytes) -> None:
        have = part.stat().st_size if part.exists() else 0
        if offset not in (0, have):
            raise Conflict(
                f"piece at byte {offset} of an upload that has {have}", "send the archive again from its start"
            )
        if offset + len(data) > LARGEST_ARCHIVE_BYTES:
            part.unlink(missing_ok=True)
            raise UserError(
                f"the archive is larger than {LARGEST_ARCHIVE_BYTES >> 20} MiB", "leave data out of working_dir"
            )
        with part.open("ab" if offset else "wb") as f:
            f.write(data)

    def _commit(self, part: Path, sha: str) -> None:
        with part.open("rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        try:
            if found != sha:
                raise UserError(f"the archive arrived as {found[:12]}…, not {sha[:12]}…", "send it again")
            check(part)
            part.replace(self._path(sha))
        finally:
            part.unlink(missing_ok=True)

    def unpack(self, sha: str, target: Path) -> None:
        """Write the archive's files below `target`, an empty folder. Raises NotFound, or UserError if it is broken."""
        archive = self._path(sha)
        if not archive.is_file():
            raise NotFound(
                f"package {sha[:12]}… is not on this node", "the controller sends it again at the next start"
            )
        entries = check(archive)
        try:
            with zipfile.ZipFile(archive) as opened:
                for info in entries:
                    _write(opened, info, target)
        except (zipfile.BadZipFile, zlib.error, EOFError) as e:
            raise UserError(f"the submitted archive is broken: {e}", "submit the folder again") from None

    def _path(self, sha: str) -> Path:
        if not DIGEST.fullmatch(sha):
            raise UserError(f"{sha[:80]!r} is not a SHA-256", "64 hexadecimal digits name a package")
        return self._folder / f"{sha}.zip"


def _write(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> None:
    path = target / PurePosixPath(info.filename)
    if info.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o755 if info.external_attr >> 16 & stat.S_IXUSR else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as to, archive.open(info) as source:
        shutil.copyfileobj(source, to, COPY_BYTES)


def check(archive: Path) -> list[zipfile.ZipInfo]:
    """The entries of an archive that may be unpacked. Raises UserError naming the entry that forbids it."""
    try:
        with zipfile.ZipFile(archive) as z:
            entries = z.infolist()
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, ValueError) as e:
        raise UserError(
            f"the submitted archive is not a zip file we can read: {e}", "submit the folder again"
        ) from None
    _check_sizes(archive, entries)
    seen: dict[str, bool] = {}
    for info in entries:
        if reason := _refusal(info):
            raise UserError(
                f"the submitted archive holds {info.filename[:200]!r}, {reason}", "leave it out of working_dir"
            )
        _check_unique(info, seen)
    return entries


def _check_sizes(archive: Path, entries: list[zipfile.ZipInfo]) -> None:
    if len(entries) > MOST_ENTRIES:
        raise UserError(
            f"the submitted archive holds {len(entries)} files, more than {MOST_ENTRIES}",
            "leave data out of working_dir",
        )
    content, packed = sum(e.file_size for e in entries), max(archive.stat().st_size, 1)
    if content > LARGEST_CONTENT_BYTES:
        raise UserError(
            f"the submitted archive unpacks to {content / 2**30:.1f} GiB, more than {LARGEST_CONTENT_BYTES >> 30}",
            "leave data out of working_dir",
        )
    if content > RATIO_FROM_BYTES and content > HIGHEST_RATIO * packed:
        raise UserError(
            f"the submitted archive unpacks to {content // packed} times its size, more than {HIGHEST_RATIO}",
            "leave files of zeros out of working_dir",
        )


def _refusal(info: zipfile.ZipInfo) -> str:
    """Why this entry cannot be unpacked; "" when it can."""
    name, kind = info.orig_filename.removesuffix("/"), stat.S_IFMT(info.external_attr >> 16)
    parts = name.split("/")
    if name.startswith("/") or FORBIDDEN.search(name):
        return "an absolute path or one with a control character or backslash"
    if any(part in ("", ".", "..") for part in parts):
        return "a path that could leave its folder"
    if len(name.encode()) > LONGEST_NAME_BYTES or any(len(part.encode()) > LONGEST_PART_BYTES for part in parts):
        return "a name that is too long"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR) or (kind == stat.S_IFDIR) > info.is_dir():
        return "which is neither a regular file nor a folder"
    if info.flag_bits & ENCRYPTED or info.compress_type not in KNOWN_METHODS:
        return "packed in a way we do not unpack"
    return ""


def _check_unique(info: zipfile.ZipInfo, seen: dict[str, bool]) -> None:
    """Refuse names a file system may take for one, and files that are also folders. `seen`: name -> is a folder."""
    name = unicodedata.normalize("NFC", info.filename.removesuffix("/")).casefold()
    whole = PurePosixPath(name)
    clash = (name in seen and not (seen[name] and info.is_dir())) or any(
        seen.get(str(p)) is False for p in whole.parents
    )
    if clash:
        raise UserError(
            f"the submitted archive holds {info.filename[:200]!r} twice, or in another case", "rename one of them"
        )
    seen[name] = info.is_dir()
    for parent in whole.parents:
        seen.setdefault(str(parent), True)
