"""Hash the content of a file or folder, and detect later changes. For data that jobs read."""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import UserError
from cluster.input.folder_access import FolderTree
from cluster.paths import write_durably

MAX_FILES = 1_000_000


@dataclass(frozen=True, slots=True)
class Content:
    """Hash and size of a file or folder.

    `sha256` of a file is what sha256sum prints. For a folder it is the hash of the lines `HASH  PATH` that sha256sum
    prints for its files, in the order of the paths' bytes. Empty folders do not count.
    """

    sha256: str
    bytes: int
    files: int
    stamp: str = ""


def content_of(path: Path, follow: bool = False) -> Content:
    """Read and hash a file or folder.

    Raises UserError for links, pipes, and names that cannot be transferred.

    `follow`: links to files count as the files, for paths that a user names on their own machine.
    """
    if path.is_file() and not path.is_symlink():
        return Content(_hash(path), path.stat().st_size, 1)
    lines, total = [], 0
    for name, size_bytes in files_of(path, follow):
        file = (path / name).resolve() if follow else path / name
        lines.append((os.fsencode(name), f"{_hash(file)}  {name}\n".encode()))
        total += size_bytes
    digest = hashlib.sha256(b"".join(line for _, line in sorted(lines)))
    return Content(digest.hexdigest(), total, len(lines))


def files_of(folder: Path, follow: bool = False) -> Iterator[tuple[str, int]]:
    """Yield the relative path and the bytes of each file below `folder`.

    Raises UserError like `content_of`, and if there is no file.
    """
    count = 0
    for entry in FolderTree(folder, follow=follow).all_entries():
        refusal = entry_error(entry["type"], entry["refused"])
        if follow and entry["type"] == "link":
            refusal = f"is a link to {entry['target']}, which is not a file that can be read"
        if refusal:
            raise UserError(f"{str(folder / entry['path'])!r} {refusal}", "leave it out, or put the file itself there")
        if entry["type"] == "file":
            count += 1
            if count > MAX_FILES:
                raise UserError(f"{folder} has more than {MAX_FILES:,} files", "pack them into fewer files")
            yield entry["path"], entry["bytes"]
    if not count:
        raise UserError(f"{folder} contains no file", "name a file, or a folder with files in it")


def entry_error(kind: str, refused: str) -> str:
    """Return why an entry of a tree (cluster/input/folder_access.py) cannot be data; "" if it can."""
    if kind == "link":
        return "is a link, and data must not contain links"
    return f"cannot be data: {refused or 'it is neither a file nor a folder'}" if refused or kind == "other" else ""


def _hash(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(f"{path} is not a regular file", "put a file there")
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_read_only(path: Path) -> None:
    """Make `path` read-only, except that executables stay executable, and sync all of it to disk."""
    if not path.is_dir():
        path.chmod(0o555 if path.stat().st_mode & stat.S_IXUSR else 0o444)
        write_durably(path)
        return
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            if stat.S_ISREG(
                (file := Path(folder, name)).lstat().st_mode
            ):  # other types are refused when the folder is hashed
                make_read_only(file)
        Path(folder).chmod(0o555)
        write_durably(Path(folder))


def stamp_of(path: Path) -> str:
    """Return a stamp that changes with any write to the content.

    It includes the change time of each inode, which only the kernel can set.
    """
    digest = hashlib.sha256()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        with suppress(OSError):
            status = current.lstat()
            digest.update(os.fsencode(current.relative_to(path)))
            digest.update(f" {status.st_mode} {status.st_size} {status.st_ino}".encode())
            if stat.S_ISDIR(status.st_mode):
                waiting += sorted(Path(entry.path) for entry in os.scandir(current))
            else:
                digest.update(f" {status.st_mtime_ns} {status.st_ctime_ns}".encode())
    return digest.hexdigest()


def delete(path: Path) -> None:
    """Delete `path`, even if folders in it are closed to their owner."""
    for folder, names, _ in os.walk(path):
        for name in names:
            if not (subfolder := Path(folder, name)).is_symlink():
                with suppress(OSError):
                    subfolder.chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)
