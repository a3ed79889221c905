"""The last step of every checkpoint, however it came to be."""

from pathlib import Path

from workers.checkpoint.disk.files import Files, write_file
from workers.checkpoint.format import manifest
from workers.checkpoint.format.manifest import Manifest


def write_manifest(files: Files, folder: Path, described: Manifest) -> None:
    """The rename in here is what makes `folder` a checkpoint."""
    part = folder / f".{manifest.NAME}.part"
    write_file(files, part, manifest.dump(described))
    files.rename(part, folder / manifest.NAME)
    files.sync_folder(folder)
