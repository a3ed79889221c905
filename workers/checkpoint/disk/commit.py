"""Commit a checkpoint: the last step, the same for saves, copies, conversions and imports."""

from pathlib import Path

from workers.checkpoint.disk.files import Files, write_file
from workers.checkpoint.format import manifest
from workers.checkpoint.format.manifest import Manifest


def write_manifest(files: Files, folder: Path, content: Manifest) -> None:
    """Write MANIFEST.json. Its rename is what makes `folder` a checkpoint."""
    part = folder / f".{manifest.NAME}.part"
    write_file(files, part, manifest.dump(content))
    files.rename(part, folder / manifest.NAME)
    files.sync_folder(folder)
