"""Check submitted folders, which are zip archives, before they are unpacked.

They are checked at submit, at upload and on the node (archive_unpack.py). Nothing in an archive is trusted. The archive
is refused for an invalid end record, for a name, type, size or count in its directory, and, when its entries are read,
for content that differs from its directory. Time and memory are bounded by the limits below. Links are checked against
the other entries (archive_links.py). Standard library only.
"""

import re
import stat
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cluster.errors import UserError
from cluster.input.archive_links import MAX_TARGET_BYTES, ArchiveTree, folders_above

MAX_ARCHIVE_BYTES = 512 << 20
MAX_CONTENT_BYTES = 8 << 30
MAX_DIRECTORY_BYTES = 32 << 20
"""Python's reader creates an object for each entry before it can count them."""
MAX_ENTRIES = 50_000
MAX_RATIO = 200
RATIO_FROM_BYTES = 16 << 20
MAX_NAME_BYTES = 1024
MAX_PART_BYTES = 255
MAX_FOLDER_DEPTH = 64
"""Maximum depth of folders; readers and file systems walk all of them for each file."""
COPY_BYTES = 1 << 20
FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]|^[A-Za-z]:")
SUPPORTED_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
ENCRYPTED = 0x1
UNREADABLE = (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, struct.error, EOFError, NotImplementedError)
END = struct.Struct("<4s4H2LH")
"""End of central directory record: signature, disk numbers, entries, size, offset, comment (APPNOTE.TXT 4.3.16)."""
END_SIGNATURE, ZIP64_SIGNATURE, ZIP64_BYTES = b"PK\x05\x06", b"PK\x06\x07", 20
SUBMIT_AGAIN = "submit the folder again"


class BrokenArchive(UserError):
    """The bytes are not a readable archive; `why` is the reader's reason."""

    def __init__(self, why: str):
        super().__init__(f"the submitted archive is not a readable zip file: {why}", SUBMIT_AGAIN)
        self.args = (why,)


def check(archive: Path) -> list[zipfile.ZipInfo]:
    """Return the entries of an archive that may be unpacked.

    Raises UserError naming the first invalid entry.
    """
    with _open_archive(archive) as z:
        entries = z.infolist()
        starts_at = z.start_dir
    _check_sizes(archive, entries)
    is_folder_by_name: dict[str, bool] = {}
    for info in entries:
        if reason := _entry_error(info) or (
            "whose data is outside the archive's data" if info.header_offset >= starts_at else ""
        ):
            raise UserError(
                f"the submitted archive contains {info.filename[:200]!r}, {reason}", "leave it out of working_dir"
            )
        _check_unique(info, is_folder_by_name)
    _check_links(archive, entries)
    return entries


def iterate_files(archive: Path, on_entry: Callable[[zipfile.ZipInfo, IO[bytes]], None]) -> None:
    """Call `on_entry` with each entry in turn, folders included, and a reader of its bytes.

    Raises UserError, possibly after some calls of `on_entry`.
    """
    entries = check(archive)
    with _open_archive(archive) as z:
        for info in entries:
            with z.open(info) as content:
                on_entry(info, content)
                if content.tell() != info.file_size:
                    raise BrokenArchive(f"{info.filename[:200]!r} is shorter than the directory says")


def is_link(info: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(info.external_attr >> 16)


def read_link_target(content: IO[bytes]) -> str:
    """Return a link's target: the content of its entry, as Info-ZIP writes it. Raises UnicodeDecodeError."""
    return content.read(MAX_TARGET_BYTES).decode()


def name_error(name: str) -> str:
    """Return why no file may have this name in an archive; "" if it may."""
    parts = name.split("/")
    if name.startswith("/") or FORBIDDEN.search(name):
        return "an absolute path or one with a control character or backslash"
    if any(part in ("", ".", "..") for part in parts):
        return "a path that could leave its folder"
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "a name that is not UTF-8"
    if sum(sizes) + len(sizes) - 1 > MAX_NAME_BYTES or max(sizes) > MAX_PART_BYTES:
        return "a name that is too long"
    if len(parts) - 1 > MAX_FOLDER_DEPTH:
        return f"which is more than {MAX_FOLDER_DEPTH} folders deep"
    return ""


@contextmanager
def _open_archive(archive: Path) -> Iterator[zipfile.ZipFile]:
    """Check the end record, then yield Python's reader; its errors become BrokenArchive."""
    with archive.open("rb") as f:
        _check_end(f)
        try:
            with zipfile.ZipFile(f) as z:
                yield z
        except (*UNREADABLE, ValueError, OverflowError) as e:  # ValueError: names that are not in their encoding
            raise BrokenArchive(str(e)) from None


def _check_end(f: IO[bytes]) -> None:
    """Raise BrokenArchive unless a directory of bounded size directly precedes the file's end record.

    A wrong offset is refused, although Python's reader would correct it. ZIP64 is not needed below our limits.
    """
    size = f.seek(0, 2)
    f.seek(max(0, size - END.size - 0xFFFF - ZIP64_BYTES))
    tail = f.read()
    position = len(tail) - END.size
    if position < 0 or not (tail[position : position + 4] == END_SIGNATURE and tail[-2:] == b"\0\0"):
        position = tail.rfind(
            END_SIGNATURE
        )  # the same two steps as in Python's reader, so that both find the same record
    if position < 0 or len(tail) - position < END.size:
        raise BrokenArchive("it has no end record")
    _, disk, first_disk, _, entries, directory_bytes, offset, comment_bytes = END.unpack_from(tail, position)
    if position + END.size + comment_bytes != len(tail):
        raise BrokenArchive("something follows its end record")
    if disk or first_disk or tail[max(0, position - ZIP64_BYTES) : position].startswith(ZIP64_SIGNATURE):
        raise BrokenArchive("it is in several parts or in the ZIP64 form")
    if offset + directory_bytes != size - len(tail) + position:
        raise BrokenArchive("its directory is not where its end record says")
    if directory_bytes > MAX_DIRECTORY_BYTES:
        raise BrokenArchive(f"its directory of {entries} files takes more than {MAX_DIRECTORY_BYTES >> 20} MiB")


def _check_sizes(archive: Path, entries: list[zipfile.ZipInfo]) -> None:
    if len(entries) > MAX_ENTRIES:
        raise UserError(
            f"the submitted archive contains {len(entries)} files, more than {MAX_ENTRIES}",
            "leave data out of working_dir",
        )
    content, packed = sum(e.file_size for e in entries), max(archive.stat().st_size, 1)
    if content > MAX_CONTENT_BYTES:
        raise UserError(
            f"the submitted archive unpacks to {content / 2**30:.1f} GiB, more than {MAX_CONTENT_BYTES >> 30} GiB",
            "leave data out of working_dir",
        )
    if content > RATIO_FROM_BYTES and content > MAX_RATIO * packed:
        raise UserError(
            f"the submitted archive unpacks to {content // packed} times its size, more than {MAX_RATIO}",
            "leave files of zeros out of working_dir",
        )


def _entry_error(info: zipfile.ZipInfo) -> str:
    """Return why this entry cannot be unpacked; "" if it can."""
    kind = stat.S_IFMT(info.external_attr >> 16)
    if reason := name_error(info.orig_filename.removesuffix("/")):
        return reason
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK) or (kind == stat.S_IFDIR) > info.is_dir():
        return "which is neither a regular file nor a folder nor a link"
    if is_link(info) and (info.is_dir() or info.file_size > MAX_TARGET_BYTES):
        return f"a link that is marked as a folder, or whose target is longer than {MAX_TARGET_BYTES} bytes"
    if info.is_dir() and info.file_size:
        return "a folder with content"
    if info.flag_bits & ENCRYPTED or info.compress_type not in SUPPORTED_METHODS:
        return "which is encrypted or uses an unsupported compression method"
    return ""


def _check_unique(info: zipfile.ZipInfo, is_folder_by_name: dict[str, bool]) -> None:
    """Refuse names that a file system may treat as equal, and files or links that are also folders.

    `is_folder_by_name` has the names of earlier entries.
    """
    name = unicodedata.normalize("NFC", info.filename.removesuffix("/")).casefold()
    parents = list(folders_above(name))
    has_conflict = (name in is_folder_by_name and not (is_folder_by_name[name] and info.is_dir())) or any(
        is_folder_by_name.get(p) is False for p in parents
    )
    if has_conflict:
        raise UserError(
            f"the submitted archive contains {info.filename[:200]!r} twice, or in another case", "rename one of them"
        )
    is_folder_by_name[name] = info.is_dir()
    for parent in parents:
        is_folder_by_name.setdefault(parent, True)
    if len(is_folder_by_name) > 2 * MAX_ENTRIES:
        raise UserError(
            f"the submitted archive contains more than {MAX_ENTRIES} folders", "leave data out of working_dir"
        )


def _check_links(archive: Path, entries: list[zipfile.ZipInfo]) -> None:
    """Refuse a link unless its target, by the names in the archive, is another entry."""
    links = [info for info in entries if is_link(info)]
    if not links:
        return
    texts: dict[str, str] = {}
    with _open_archive(archive) as z:
        for info in links:
            with z.open(info) as content:
                texts[info.filename] = read_link_target(content)
    tree = ArchiveTree((info.filename for info in entries), texts)
    for name in texts:
        if reason := tree.link_error(name):
            raise UserError(
                f"the submitted archive contains {name[:200]!r}, a link {reason}", "leave it out of working_dir"
            )
