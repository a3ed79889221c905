"""Folders in which processes create and remove files while a test reads them."""

import os
from collections.abc import Iterator
from pathlib import Path


def list_files(*roots: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each root and what is below it, with its own status (links are not followed). Entries that are removed meanwhile
    are left out: `Path.rglob` raises FileNotFoundError for them in Python 3.11."""
    for root in roots:
        names = [str(root)]
        for folder, folders, files in os.walk(root):
            names += [os.path.join(folder, name) for name in (*folders, *files)]  # noqa: PTH118
        for name in names:
            try:
                yield Path(name), os.lstat(name)
            except FileNotFoundError:
                continue


def read_text(path: Path) -> str:
    """Its text, empty where it was removed meanwhile."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
