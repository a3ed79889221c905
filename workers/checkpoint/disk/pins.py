"""Pinned checkpoints stay, however many newer ones there are. A pin is a file beside the manifest, no part of it."""

import os
from pathlib import Path

PIN = ".pinned"


def pin(folder: str | Path) -> None:
    """Keep a checkpoint for good."""
    (Path(folder) / PIN).touch()


def unpin(folder: str | Path) -> None:
    (Path(folder) / PIN).unlink(missing_ok=True)


def is_pinned(folder: Path) -> bool:
    return os.path.lexists(folder / PIN)
