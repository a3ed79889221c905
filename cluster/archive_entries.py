"""Entries of submitted archives: permission bits, modification times, and a hash of the content of all of them.

Times are whole seconds of UTC in the extra field that Info-ZIP writes and `unzip` reads. ZIP's own field has local time
in steps of two seconds. Source: Info-ZIP, extrafld.txt, "Extended Timestamp".
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
"""Name, permission bits, and the SHA-256 of the content; of a link its target instead."""


def content_sha(facts: Iterable[Fact]) -> str:
    """SHA-256, hexadecimal, over all entries. It does not depend on times or on the order of the entries."""
    return hashlib.sha256(json.dumps(sorted(facts)).encode()).hexdigest()


def rights(info: zipfile.ZipInfo) -> int:
    """Permission bits of the unpacked file: its owner can read it, others cannot write to it, and setuid is dropped."""
    mode = info.external_attr >> 16
    return mode & 0o755 | stat.S_IRUSR if mode else 0o644


def time_field(modified_s: int) -> bytes:
    """Value of `ZipInfo.extra` for a modification time. Empty where the time does not fit (before 1901, after 2038):
    the unpacked file then has the time at which it was written.
    """
    if not -(1 << 31) <= modified_s < 1 << 31:
        return b""
    return _HEADER.pack(TAG, _TIME.size) + _TIME.pack(MODIFIED, modified_s)


def modified_s(info: zipfile.ZipInfo) -> "int | None":
    """Modification time from the entry's extra fields, which may contain anything; None where they have none."""
    extra, at = info.extra, 0
    while at + _HEADER.size <= len(extra):
        tag, size = _HEADER.unpack_from(extra, at)
        at += _HEADER.size
        if tag == TAG and _TIME.size <= size <= len(extra) - at:
            flags, seconds = _TIME.unpack_from(extra, at)
            return int(seconds) if flags & MODIFIED else None
        at += size
    return None
