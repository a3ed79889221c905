"""Submitted folders as zip archives: what is checked of them, at submit, at upload and on the node (archive_unpack.py).

Nothing in an archive is believed. It is refused as a whole for its end record, for a name, type, size or count in its
directory, and, when its entries are read, for content that does not unpack to what was announced. Time and memory are
bounded by the limits below. Links are checked against the other entries (archive_links.py). Standard library only.
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

from cluster.archive_links import MAX_TEXT_BYTES, Tree, folders_above
from cluster.errors import UserError

LARGEST_ARCHIVE_BYTES = 512 << 20
LARGEST_CONTENT_BYTES = 8 << 30
LARGEST_DIRECTORY_BYTES = 32 << 20
"""Python's reader makes an object of each entry before it can be asked how many there are."""
MOST_ENTRIES = 50_000
HIGHEST_RATIO = 200
RATIO_FROM_BYTES = 16 << 20
LONGEST_NAME_BYTES = 1024
LONGEST_PART_BYTES = 255
MOST_FOLDERS = 64
"""One in another; readers and file systems walk each of them for each file."""
COPY_BYTES = 1 << 20
FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]|^[A-Za-z]:")
KNOWN_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
ENCRYPTED = 0x1
UNREADABLE = (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, struct.error, EOFError, NotImplementedError)
END = struct.Struct("<4s4H2LH")
"""End of central directory record, APPNOTE.TXT 4.3.16: signature, disk numbers, entries, size, offset, comment."""
END_SIGNATURE, ZIP64_SIGNATURE, ZIP64_BYTES = b"PK\x05\x06", b"PK\x06\x07", 20
AGAIN = "submit the folder again"


class BrokenArchive(UserError):
    """The bytes are not an archive that can be read; `why` is the reader's reason."""

    def __init__(self, why: str):
        super().__init__(f"the submitted archive is not a zip file we can read: {why}", AGAIN)
        self.args = (why,)


def check(archive: Path) -> list[zipfile.ZipInfo]:
    """The entries of an archive that may be unpacked. Raises UserError naming the entry that forbids it."""
    with _opened(archive) as z:
        entries = z.infolist()
        starts_at = z.start_dir
    _check_sizes(archive, entries)
    seen: dict[str, bool] = {}
    for info in entries:
        if reason := _refusal(info) or ("whose data lies outside" if info.header_offset >= starts_at else ""):
            raise UserError(
                f"the submitted archive holds {info.filename[:200]!r}, {reason}", "leave it out of working_dir"
            )
        _check_unique(info, seen)
    _check_links(archive, entries)
    return entries


def iterate_files(archive: Path, take: Callable[[zipfile.ZipInfo, IO[bytes]], None]) -> None:
    """`take` gets the entries in turn, folders too, each with a reader of its bytes. Raises UserError; what `take` has
    done until then stays.
    """
    entries = check(archive)
    with _opened(archive) as z:
        for info in entries:
            with z.open(info) as content:
                take(info, content)
                if content.tell() != info.file_size:
                    raise BrokenArchive(f"{info.filename[:200]!r} holds less than the directory says")


def is_link(info: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(info.external_attr >> 16)


def link_text(content: IO[bytes]) -> str:
    """What a link says: the content of its entry, as Info-ZIP writes it. Raises UnicodeDecodeError."""
    return content.read(MAX_TEXT_BYTES).decode()


def name_error(name: str) -> str:
    """Why no file may have this name in an archive; "" when it may."""
    parts = name.split("/")
    if name.startswith("/") or FORBIDDEN.search(name):
        return "an absolute path or one with a control character or backslash"
    if any(part in ("", ".", "..") for part in parts):
        return "a path that could leave its folder"
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "a name that is not UTF-8"
    if sum(sizes) + len(sizes) - 1 > LONGEST_NAME_BYTES or max(sizes) > LONGEST_PART_BYTES:
        return "a name that is too long"
    if len(parts) - 1 > MOST_FOLDERS:
        return f"which lies in more than {MOST_FOLDERS} folders"
    return ""


@contextmanager
def _opened(archive: Path) -> Iterator[zipfile.ZipFile]:
    """Python's reader, once the end record was checked, with each of its errors as one of ours."""
    with archive.open("rb") as f:
        _check_end(f)
        try:
            with zipfile.ZipFile(f) as z:
                yield z
        except (*UNREADABLE, ValueError, OverflowError) as e:  # ValueError: names that are not in their encoding
            raise BrokenArchive(str(e)) from None


def _check_end(f: IO[bytes]) -> None:
    """Raises BrokenArchive unless a directory of bounded size lies right before the record that ends the file.

    A wrong offset is not repaired, as Python's reader would do, and ZIP64 is not needed below our limits.
    """
    size = f.seek(0, 2)
    f.seek(max(0, size - END.size - 0xFFFF - ZIP64_BYTES))
    tail = f.read()
    at = len(tail) - END.size
    if at < 0 or not (tail[at : at + 4] == END_SIGNATURE and tail[-2:] == b"\0\0"):
        at = tail.rfind(END_SIGNATURE)  # the same two steps as Python's reader, so that both find the same record
    if at < 0 or len(tail) - at < END.size:
        raise BrokenArchive("it has no end record")
    _, disk, first_disk, _, entries, directory_bytes, offset, comment_bytes = END.unpack_from(tail, at)
    if at + END.size + comment_bytes != len(tail):
        raise BrokenArchive("something follows its end record")
    if disk or first_disk or tail[max(0, at - ZIP64_BYTES) : at].startswith(ZIP64_SIGNATURE):
        raise BrokenArchive("it is in several parts or in the ZIP64 form")
    if offset + directory_bytes != size - len(tail) + at:
        raise BrokenArchive("its directory is not where its end record says")
    if directory_bytes > LARGEST_DIRECTORY_BYTES:
        raise BrokenArchive(f"its directory of {entries} files takes more than {LARGEST_DIRECTORY_BYTES >> 20} MiB")


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
    kind = stat.S_IFMT(info.external_attr >> 16)
    if reason := name_error(info.orig_filename.removesuffix("/")):
        return reason
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK) or (kind == stat.S_IFDIR) > info.is_dir():
        return "which is neither a regular file nor a folder nor a link"
    if is_link(info) and (info.is_dir() or info.file_size > MAX_TEXT_BYTES):
        return f"a link that is called a folder or says more than {MAX_TEXT_BYTES} bytes"
    if info.is_dir() and info.file_size:
        return "a folder with content"
    if info.flag_bits & ENCRYPTED or info.compress_type not in KNOWN_METHODS:
        return "packed in a way we do not unpack"
    return ""


def _check_unique(info: zipfile.ZipInfo, seen: dict[str, bool]) -> None:
    """Refuse names a file system may take for one, and files or links that are also folders. `seen`: name -> is a
    folder.
    """
    name = unicodedata.normalize("NFC", info.filename.removesuffix("/")).casefold()
    above = list(folders_above(name))
    clash = (name in seen and not (seen[name] and info.is_dir())) or any(seen.get(p) is False for p in above)
    if clash:
        raise UserError(
            f"the submitted archive holds {info.filename[:200]!r} twice, or in another case", "rename one of them"
        )
    seen[name] = info.is_dir()
    for parent in above:
        seen.setdefault(parent, True)
    if len(seen) > 2 * MOST_ENTRIES:
        raise UserError(
            f"the submitted archive holds more than {MOST_ENTRIES} folders", "leave data out of working_dir"
        )


def _check_links(archive: Path, entries: list[zipfile.ZipInfo]) -> None:
    """Refuse a link unless what it says leads, by the names in the archive, to another entry."""
    links = [info for info in entries if is_link(info)]
    if not links:
        return
    texts: dict[str, str] = {}
    with _opened(archive) as z:
        for info in links:
            with z.open(info) as content:
                texts[info.filename] = link_text(content)
    tree = Tree((info.filename for info in entries), texts)
    for name in texts:
        if reason := tree.refusal(name):
            raise UserError(
                f"the submitted archive holds {name[:200]!r}, a link {reason}", "leave it out of working_dir"
            )
