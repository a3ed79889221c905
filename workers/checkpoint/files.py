"""The few file operations a save makes, as an object, so that a test can stop the world at any one of them.

An object store or an O_DIRECT writer would be another class of the same shape.
"""

import os
from pathlib import Path
from typing import BinaryIO


class Files:
    """Operations on a local file system. Modes follow the umask: other pods and users can read what this one saved."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir()

    def create(self, path: Path) -> BinaryIO:
        """A new file; an existing one is an error, so nothing is ever overwritten."""
        return path.open("xb")

    def write(self, file: BinaryIO, data: "bytes | memoryview") -> None:
        file.write(data)

    def close_durably(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in `folder` durable: a file's fsync does not."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, folder: Path) -> None:
        folder.rmdir()
