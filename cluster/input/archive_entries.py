"""Entries of submitted archives: permission bits, modification times, and a hash over all entries.

Times are seconds of UTC in the extra field that Info-ZIP writes and `unzip` reads. ZIP's own field has local time in
steps of two seconds. Source: Info-ZIP, extrafld.txt, "Extended Timestamp".
"""

import hashlib
import json
import stat
import struct
import zipfile
from collections.abc import Iterable

from cluster.input.archive_links import folders_above

TAG = 0x5455
MODIFIED = 1
_HEADER = struct.Struct("<HH")
_TIME = struct.Struct("<Bi")

Fact = tuple[str, int, str]
"""Name, permission bits, and the SHA-256 of the content; for a link its target instead."""


def content_sha(facts: Iterable[Fact]) -> str:
    """Return the SHA-256, hexadecimal, of all entries except folders that contain others.

    It does not depend on times or on the order of the entries.
    """
    by_name = {fact[0]: fact for fact in facts}
    content = [by_name[name] for name in without_parents(by_name)]
    return hashlib.sha256(json.dumps(sorted(content)).encode()).hexdigest()


def without_parents(names: Iterable[str]) -> list[str]:
    """Return the names without those of folders that contain others. Names of folders end with a slash."""
    names = list(names)
    empty = {name for name in names if name.endswith("/")}
    for name in names if empty else ():
        empty.difference_update(f"{folder}/" for folder in folders_above(name.removesuffix("/")))
    return [name for name in names if not name.endswith("/") or name in empty]


def permission_bits(info: zipfile.ZipInfo) -> int:
    """Return the unpacked entry's permission bits: owner can read, others cannot write, no setuid.

    The owner of a folder can always add to it and remove it. Some archivers write no bits for folders.
    """
    mode = info.external_attr >> 16
    if info.is_dir():
        return mode & 0o755 | stat.S_IRWXU if mode & 0o777 else 0o755
    return mode & 0o755 | stat.S_IRUSR if mode else 0o644


def time_field(modified_s: int) -> bytes:
    """Return `ZipInfo.extra` for a modification time.

    It is empty for a time that does not fit (before 1901, after 2038): the unpacked file then has the time at which it
    was written.
    """
    if not -(1 << 31) <= modified_s < 1 << 31:
        return b""
    return _HEADER.pack(TAG, _TIME.size) + _TIME.pack(MODIFIED, modified_s)


def modification_time_s(info: zipfile.ZipInfo) -> "int | None":
    """Return the modification time from the extra fields, or None. The fields may contain anything."""
    extra, at = info.extra, 0
    while at + _HEADER.size <= len(extra):
        tag, size = _HEADER.unpack_from(extra, at)
        at += _HEADER.size
        if tag == TAG and _TIME.size <= size <= len(extra) - at:
            flags, seconds = _TIME.unpack_from(extra, at)
            return int(seconds) if flags & MODIFIED else None
        at += size
    return None
