"""Our own packages as a folder that any pool's Python can have on its path: no environment needs Polyfleet itself."""

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
SOURCE = Path(__file__).parent.parent
CACHED = "__pycache__"


def export() -> Path:
    """A folder in the cache with exactly the code that runs here, named by its content; quick when it is there already.

    It appears whole or not at all and never changes: editing the source does not touch a running fleet. One to which
    anything was added that could be imported, or that another user could change, is replaced.
    """
    files = _files(SOURCE)
    target = paths.cache_dir("code") / _digest(files)
    if _is_whole(target, files):
        return target
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent, ignore_cleanup_errors=True) as part:
        whole = Path(part) / "code"
        for name, content in files.items():
            paths.private_dir((whole / name).parent)
            with paths.open_private(whole / name) as f:
                f.write(content)
        with suppress(FileNotFoundError):
            target.rename(Path(part) / "replaced")
        try:
            whole.rename(target)
        except OSError:
            if not _is_whole(target, files):  # else another process was first, with the same content
                raise
    return target


def archive() -> bytes:
    """The same code as a tar file, compressed: of the same code the same bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=1) as tar:
        for name, content in _files(SOURCE).items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _is_whole(target: Path, files: dict[str, bytes]) -> bool:
    """It holds these files and nothing else but what Python compiled from them, and nobody else can write there."""
    found = {}
    try:
        for path, status in _entries(target):
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return False
            if stat.S_ISREG(status.st_mode):
                if path.parent.name != CACHED:
                    found[str(path.relative_to(target))] = path.read_bytes()
            elif not stat.S_ISDIR(status.st_mode):
                return False
    except OSError:  # none is there, or somebody replaces it now
        return False
    return found == files


def _entries(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The folder and everything below it; links are not followed."""
    yield folder, folder.lstat()
    for above, folders, names in os.walk(folder, onerror=_raise):
        for name in (*folders, *names):
            yield Path(above, name), Path(above, name).lstat()


def _raise(error: OSError) -> None:
    raise error


def _files(root: Path) -> dict[str, bytes]:
    """Every file of the packages, data files too; not what Python or an editor leaves beside them."""
    found = (file for package in PACKAGES for file in (root / package).rglob("*"))
    kept = (f for f in found if f.is_file() and CACHED not in f.parts and not f.name.startswith("."))
    return {str(f.relative_to(root)): f.read_bytes() for f in sorted(kept)}


def _digest(files: dict[str, bytes]) -> str:
    total = hashlib.sha256()
    for name, content in files.items():
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:16]
