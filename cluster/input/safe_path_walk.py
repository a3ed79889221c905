"""Open a folder below another one step by step, without following links.

Each folder is opened relative to the one before. A user who can write to one of them therefore cannot redirect us by
replacing a folder with a link during the walk.
"""

import os
from collections.abc import Iterable
from contextlib import suppress

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def descend(folder: int, names: Iterable[str], *, create: bool = False) -> int:
    """Return a descriptor of the folder at `names` below `folder`. Closes `folder`, also on an error.

    `create`: create missing folders. Raises OSError.
    """
    for name in names:
        try:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=folder)
            subfolder = os.open(name, FOLDER, dir_fd=folder)
        finally:
            os.close(folder)
        folder = subfolder
    return folder
