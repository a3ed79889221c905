"""Our own packages as a folder that any pool's Python can have on its path: no environment needs Polyfleet itself."""

import hashlib
import shutil
import tempfile
from pathlib import Path

from cluster import paths

PACKAGES = ("cluster", "workers", "orchestrator")
SOURCE = Path(__file__).parent.parent


def export() -> Path:
    """A folder in the cache with exactly the code that runs here, named by its content; quick when it is there already.

    It appears whole or not at all and never changes: editing the source does not touch a running fleet.
    """
    files = _files(SOURCE)
    target = paths.cache() / "code" / _digest(files)
    if target.is_dir():
        if _digest(_files(target)) == target.name:
            return target
        shutil.rmtree(target)  # a cleaner of old files was here
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent, ignore_cleanup_errors=True) as part:
        whole = Path(part) / "code"
        for name, content in files.items():
            (whole / name).parent.mkdir(parents=True, exist_ok=True)
            (whole / name).write_bytes(content)
        try:
            whole.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same content
                raise
    return target


def _files(root: Path) -> dict[str, bytes]:
    """Every file of the packages, data files too; not what Python or an editor leaves beside them."""
    found = (file for package in PACKAGES for file in (root / package).rglob("*"))
    kept = (f for f in found if f.is_file() and "__pycache__" not in f.parts and not f.name.startswith("."))
    return {str(f.relative_to(root)): f.read_bytes() for f in sorted(kept)}


def _digest(files: dict[str, bytes]) -> str:
    total = hashlib.sha256()
    for name, content in files.items():
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:16]
