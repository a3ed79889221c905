"""What an entry of a submitted archive says of its file: rights and time; and the name of what is in an archive.

Times are whole seconds of UTC in the extra field that Info-ZIP writes and `unzip` reads; the archive's own format has
local time in steps of two seconds. Source: Info-ZIP, extrafld.txt, "Extended Timestamp".
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
"""Name, rights, and the SHA-256 of the content or, of a link, what it says."""


def content_sha(facts: Iterable[Fact]) -> str:
    """A SHA-256 that is the same whatever the times of the files and the order of the entries."""
    return hashlib.sha256(json.dumps(sorted(facts)).encode()).hexdigest()


def rights(info: zipfile.ZipInfo) -> int:
    """With which its file arrives: the owner may read it always. No setuid, and nobody else may write."""
    mode = info.external_attr >> 16
    return mode & 0o755 | stat.S_IRUSR if mode else 0o644


def time_field(modified_s: int) -> bytes:
    """For `ZipInfo.extra`. Empty for a time that does not fit (before 1901, after 2038): its file arrives with the time
    of the copy.
    """
    if not -(1 << 31) <= modified_s < 1 << 31:
        return b""
    return _HEADER.pack(TAG, _TIME.size) + _TIME.pack(MODIFIED, modified_s)


def modified_s(info: zipfile.ZipInfo) -> "int | None":
    """From its extra fields, which may hold anything; None where no time of modification is in them."""
    extra, at = info.extra, 0
    while at + _HEADER.size <= len(extra):
        tag, size = _HEADER.unpack_from(extra, at)
        at += _HEADER.size
        if tag == TAG and _TIME.size <= size <= len(extra) - at:
            flags, seconds = _TIME.unpack_from(extra, at)
            return int(seconds) if flags & MODIFIED else None
        at += size
    return None
