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

TAG = 0x5455
MODIFIED = 1
_HEADER = struct.Struct("<HH")
_TIME = struct.Struct("<Bi")

Fact = tuple[str, int, str]
"""Name, permission bits, and the SHA-256 of the content; for a link its target instead."""


def content_sha(facts: Iterable[Fact]) -> str:
    """Return the SHA-256, hexadecimal, of all entries.

    It does not depend on times or on the order of the entries.
    """
    return hashlib.sha256(json.dumps(sorted(facts)).encode()).hexdigest()


def permission_bits(info: zipfile.ZipInfo) -> int:
    """Return the unpacked file's permission bits: owner can read, others cannot write, no setuid."""
    mode = info.external_attr >> 16
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
