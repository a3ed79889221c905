"""Open and list untrusted folders without following links; lists have a fixed order and go on from any position.

Each folder is opened relative to the one before. A user who can write to one of them therefore cannot redirect us by
replacing a folder with a link during the walk.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypedDict
from urllib.parse import quote, unquote_to_bytes

from cluster.input.checkpoint_location import path_error

Parts = tuple[str, ...]
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class EntryFields(TypedDict):
    """What a folder says of one of its entries. `type` is file, folder, link or other (a pipe, a socket, a device).

    `mode` has the permission bits. `target` is that of a link.
    """

    path: str
    type: str
    bytes: int
    modified_s: float
    mode: int
    target: str


class FolderEntry(EntryFields):
    """One entry of a folder. `refused` is why it cannot be transferred, or ""."""

    refused: str


def descend(folder: int, names: Iterable[str], *, create: bool = False) -> int:
    """Return a descriptor of the folder at `names` below `folder`. Closes `folder`, also on an error.

    `create`: create missing folders. Raises OSError.
    """
    for name in names:
        try:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=folder)
            subfolder = os.open(name, FOLDER, dir_fd=folder)
        finally:
            os.close(folder)
        folder = subfolder
    return folder


def link_error(path: str, target: str) -> str:
    """Return why a link at `path` may not be created in a copy of its tree; "" if its target is inside.

    `..` is accepted at the front only, where it is relative to the link's own folder, which is not a link. After a name
    it could be relative to the target of another link.
    """
    parts = target.split("/")
    up = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    if up > path.count("/"):
        return "it points outside the folder"
    return path_error("/".join(parts[up:])) if parts[up:] else ""


def cursor(parts: Parts) -> str:
    """Encode a position in the listing as text: names may contain bytes that JSON cannot hold."""
    return quote(os.fsencode("/".join(parts)), safe="")


def from_cursor(text: str) -> Parts:
    return tuple(os.fsdecode(unquote_to_bytes(text)).split("/")) if text else ()


def walk_entries(folder: int, parts: Parts, after: Parts, follow: bool = False) -> Iterator[tuple[Parts, FolderEntry]]:
    """Yield the entries of `folder` behind `after`, in the order of their parts.

    A folder comes before its content. Entries that are created or removed during the listing may be missing.
    """
    depth = len(parts)
    start = after[depth] if len(after) > depth and after[:depth] == parts else ""
    for name in sorted(name for name in os.listdir(folder) if name >= start):
        try:
            item = entry(folder, name, (*parts, name), follow)
        except FileNotFoundError:
            continue
        if (*parts, name) > after:
            yield (*parts, name), item
        if item["type"] == "folder" and not item["refused"]:
            with suppress(OSError):
                inner = os.open(name, FOLDER, dir_fd=folder)
                try:
                    yield from walk_entries(inner, (*parts, name), after, follow)
                finally:
                    os.close(inner)


def entry(folder: int, name: str, parts: Parts, follow: bool = False) -> FolderEntry:
    """Describe one entry. With `follow`, a link to a regular file counts as that file."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if follow and stat.S_ISLNK(status.st_mode):
        with suppress(OSError):
            if stat.S_ISREG((target_status := os.stat(name, dir_fd=folder)).st_mode):
                status = target_status
    target, path = "", "/".join(parts)
    if stat.S_ISLNK(status.st_mode):
        kind, target = "link", os.readlink(name, dir_fd=folder)
    elif stat.S_ISDIR(status.st_mode):
        kind = "folder"
    else:
        kind = "file" if stat.S_ISREG(status.st_mode) else "other"
    refused = path_error(path) or (link_error(path, target) if kind == "link" else "")
    return {
        "path": _text(path),
        "type": kind,
        "bytes": status.st_size if kind == "file" else 0,
        "modified_s": status.st_mtime,
        "mode": stat.S_IMODE(status.st_mode) & 0o777,
        "target": _text(target),
        "refused": refused or ("it is not a file, folder or link" if kind == "other" else ""),
    }


def _text(name: str) -> str:
    """Replace bytes that are not UTF-8 by `?`: JSON cannot hold such a name, so the entry is refused."""
    return os.fsencode(name).decode("utf-8", "replace")
