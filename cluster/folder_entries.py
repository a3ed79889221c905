"""What lies in a folder that others fill: listed in a fixed order, from any place in it on, without following links."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import TypedDict
from urllib.parse import quote, unquote_to_bytes

from cluster.checkpoint_location import path_error
from cluster.safe_path_walk import FOLDER

Parts = tuple[str, ...]


class Entry(TypedDict):
    """`type` is file, folder, link or other (a pipe, a socket, a device). `refused`: why its name cannot travel, or "".
    `mode` has the permission bits.
    """

    path: str
    type: str
    bytes: int
    modified_s: float
    mode: int
    target: str
    refused: str


def link_refusal(path: str, target: str) -> str:
    """Why a link at `path` may not be made anew in a copy of its tree; "" when it stays inside.

    `..` is taken at the front only, where it counts from the link's own folder, which is no link: what follows a name
    could be reached through another link.
    """
    parts = target.split("/")
    up = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    if up > path.count("/"):
        return "it leads out of the folder"
    return path_error("/".join(parts[up:])) if parts[up:] else ""


def cursor(parts: Parts) -> str:
    """Names may be no text that JSON holds."""
    return quote(os.fsencode("/".join(parts)), safe="")


def from_cursor(text: str) -> Parts:
    return tuple(os.fsdecode(unquote_to_bytes(text)).split("/")) if text else ()


def below(folder: int, parts: Parts, after: Parts, follow: bool = False) -> Iterator[tuple[Parts, Entry]]:
    """In the order of parts, a folder before what is in it. What appears or vanishes meanwhile may be left out."""
    depth = len(parts)
    start = after[depth] if len(after) > depth and after[:depth] == parts else ""
    for name in sorted(name for name in os.listdir(folder) if name >= start):
        try:
            found = entry(folder, name, (*parts, name), follow)
        except FileNotFoundError:
            continue
        if (*parts, name) > after:
            yield (*parts, name), found
        if found["type"] == "folder" and not found["refused"]:
            with suppress(OSError):
                inner = os.open(name, FOLDER, dir_fd=folder)
                try:
                    yield from below(inner, (*parts, name), after, follow)
                finally:
                    os.close(inner)


def entry(folder: int, name: str, parts: Parts, follow: bool = False) -> Entry:
    """With `follow` a link to a regular file counts as that file."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if follow and stat.S_ISLNK(found.st_mode):
        with suppress(OSError):
            if stat.S_ISREG((behind := os.stat(name, dir_fd=folder)).st_mode):
                found = behind
    target, path = "", "/".join(parts)
    if stat.S_ISLNK(found.st_mode):
        kind, target = "link", os.readlink(name, dir_fd=folder)
    elif stat.S_ISDIR(found.st_mode):
        kind = "folder"
    else:
        kind = "file" if stat.S_ISREG(found.st_mode) else "other"
    refused = path_error(path) or (link_refusal(path, target) if kind == "link" else "")
    return {
        "path": _text(path),
        "type": kind,
        "bytes": found.st_size if kind == "file" else 0,
        "modified_s": found.st_mtime,
        "mode": stat.S_IMODE(found.st_mode) & 0o777,
        "target": _text(target),
        "refused": refused or ("it is no file, folder or link" if kind == "other" else ""),
    }


def _text(name: str) -> str:
    """Bytes that are no UTF-8 as `?`: such a name cannot be written into JSON, and cannot travel."""
    return os.fsencode(name).decode("utf-8", "replace")
