"""A folder reached from one above it, step by step: each is opened relative to the one before, and no link is followed.

Whoever may write in between cannot lead us elsewhere by putting a link in the place of a folder while we look.
"""

import os
from collections.abc import Iterable
from contextlib import suppress

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def descend(folder: int, names: Iterable[str], *, make: bool = False) -> int:
    """A descriptor of the folder there; `folder` is closed, also on an error. `make`: folders that are absent are made.

    Raises OSError.
    """
    for name in names:
        try:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=folder)
            below = os.open(name, FOLDER, dir_fd=folder)
        finally:
            os.close(folder)
        folder = below
    return folder
