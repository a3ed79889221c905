"""Export our own packages to a folder that every pool's Python has on its path.

No environment needs Polyfleet itself installed.
"""

import hashlib
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cluster import paths

PACKAGES = ("cluster", "workers", "orchestrator")
SOURCE = Path(__file__).parents[2]
CACHED = "__pycache__"


def export() -> Path:
    """Return a folder in the cache with exactly the code that runs here, named by its hash.

    Fast if it exists already.

    The folder is created atomically and never changes: editing the source does not affect a running fleet. It is
    replaced if anything importable was added to it, or if another user could change it.
    """
    files = _files(SOURCE)
    target = paths.cache_dir("code") / _digest(files)
    if _is_complete(target, files):
        return target
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent, ignore_cleanup_errors=True) as part:
        staging = Path(part) / "code"
        for name, content in files.items():
            paths.private_dir((staging / name).parent)
            with paths.open_private(staging / name) as f:
                f.write(content)
        with suppress(FileNotFoundError):
            target.rename(Path(part) / "replaced")
        try:
            staging.rename(target)
        except OSError:
            if not _is_complete(target, files):  # else another process was first, with the same content
                raise
    return target


def archive() -> bytes:
    """Return the same code as a compressed tar file. The same code gives the same bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=1) as tar:
        for name, content in _files(SOURCE).items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _is_complete(target: Path, files: dict[str, bytes]) -> bool:
    """Return whether `target` has exactly these files and only this user can write to it.

    Code that Python compiled from them is ignored.
    """
    present = {}
    try:
        for path, status in _entries(target):
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return False
            if stat.S_ISREG(status.st_mode):
                if path.parent.name != CACHED:
                    present[str(path.relative_to(target))] = path.read_bytes()
            elif not stat.S_ISDIR(status.st_mode):
                return False
    except OSError:  # there is none, or another process is replacing it
        return False
    return present == files


def _entries(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the folder and everything below it, without following links."""
    yield folder, folder.lstat()
    for parent, folders, names in os.walk(folder, onerror=_raise):
        for name in (*folders, *names):
            yield Path(parent, name), Path(parent, name).lstat()


def _raise(error: OSError) -> None:
    raise error


def _files(root: Path) -> dict[str, bytes]:
    """Read every file of the packages, data files included, but no caches and hidden files."""
    paths = (file for package in PACKAGES for file in (root / package).rglob("*"))
    files = (f for f in paths if f.is_file() and CACHED not in f.parts and not f.name.startswith("."))
    return {str(f.relative_to(root)): f.read_bytes() for f in sorted(files)}


def _digest(files: dict[str, bytes]) -> str:
    total = hashlib.sha256()
    for name, content in files.items():
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:16]
