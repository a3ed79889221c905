"""What is in a file or folder, as one SHA-256, and whether anybody has changed it since. For data that jobs read."""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import UserError
from cluster.folder_access import Tree
from cluster.paths import write_durably

MOST_FILES = 1_000_000


@dataclass(frozen=True, slots=True)
class Content:
    """`sha256`: of a file what sha256sum prints; of a folder that of all its files' lines, `HASH  PATH` as sha256sum
    prints them, in the order of the paths' bytes. Empty folders do not count.
    """

    sha256: str
    bytes: int
    files: int
    stamp: str = ""


def content_of(path: Path, follow: bool = False) -> Content:
    """Of a file or folder, every byte of it read. Raises UserError for links, pipes, and names that cannot travel.
    `follow`: links to files count as the files, for what a user names on a machine of their own.
    """
    if path.is_file() and not path.is_symlink():
        return Content(_hash(path), path.stat().st_size, 1)
    lines, total = [], 0
    for name, size_bytes in files_of(path, follow):
        file = (path / name).resolve() if follow else path / name
        lines.append((os.fsencode(name), f"{_hash(file)}  {name}\n".encode()))
        total += size_bytes
    whole = hashlib.sha256(b"".join(line for _, line in sorted(lines)))
    return Content(whole.hexdigest(), total, len(lines))


def files_of(folder: Path, follow: bool = False) -> Iterator[tuple[str, int]]:
    """Path in it, and bytes, of each file below a folder. Raises UserError as `content_of`, and where there is none."""
    count = 0
    for entry in Tree(folder, follow=follow).all_entries():
        refusal = entry_refusal(entry["type"], entry["refused"])
        if follow and entry["type"] == "link":
            refusal = f"is a link to {entry['target']}, which is not a file that can be read"
        if refusal:
            raise UserError(f"{str(folder / entry['path'])!r} {refusal}", "leave it out, or put the file itself there")
        if entry["type"] == "file":
            count += 1
            if count > MOST_FILES:
                raise UserError(f"{folder} has more than {MOST_FILES:,} files", "pack them into fewer")
            yield entry["path"], entry["bytes"]
    if not count:
        raise UserError(f"{folder} holds no file", "name a file, or a folder with files in it")


def entry_refusal(kind: str, refused: str) -> str:
    """Why an entry of a tree (cluster/folder_access.py) cannot be data; "" where it can."""
    if kind == "link":
        return "is a link, and data holds no links"
    return f"cannot be data: {refused or 'it is no file and no folder'}" if refused or kind == "other" else ""


def _hash(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(f"{path} is not a regular file", "put a file there")
        return hashlib.file_digest(file, "sha256").hexdigest()


def close(path: Path) -> None:
    """Nobody may write, all is on disk. Whether a file may be run stays."""
    if not path.is_dir():
        path.chmod(0o555 if path.stat().st_mode & stat.S_IXUSR else 0o444)
        write_durably(path)
        return
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            if stat.S_ISREG((file := Path(folder, name)).lstat().st_mode):  # others are refused where all is read
                close(file)
        Path(folder).chmod(0o555)
        write_durably(Path(folder))


def stamp_of(path: Path) -> str:
    """Changes with any write into the content: the kernel sets the time of an inode's last change itself."""
    told = hashlib.sha256()
    waiting = [path]
    while waiting:
        here = waiting.pop()
        with suppress(OSError):
            found = here.lstat()
            told.update(os.fsencode(here.relative_to(path)))
            told.update(f" {found.st_mode} {found.st_size} {found.st_ino}".encode())
            if stat.S_ISDIR(found.st_mode):
                waiting += sorted(Path(entry.path) for entry in os.scandir(here))
            else:
                told.update(f" {found.st_mtime_ns} {found.st_ctime_ns}".encode())
    return told.hexdigest()


def delete(path: Path) -> None:
    """Folders in it may be closed to their owner, too."""
    for folder, names, _ in os.walk(path):
        for name in names:
            if not (below := Path(folder, name)).is_symlink():
                with suppress(OSError):
                    below.chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)
