"""Begin and end the writing of checkpoints: one writer per folder, and the manifest last.

The last step is the same for saves, copies, conversions and imports. Copies do not take the writer's lock: each locks
the folder that it receives (transfer/receiver.py).
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import Conflict
from workers.checkpoint.disk.files import Files, write_file
from workers.checkpoint.format.manifest import NAME

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def writer_lock(root: Path) -> Iterator[None]:
    """Create `root` and lock it. Raises Conflict while another process writes there.

    The folder itself is locked, so no lock file remains. A file system without locks is used without: names are unique,
    so the worst that two writers can do to each other is to clean up at the same time.
    """
    root.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"another process is saving into {root} now", "wait until it has finished, or save into another folder"
            ) from None
        except OSError as e:
            if e.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


def write_manifest(files: Files, folder: Path, text: bytes) -> None:
    """Write MANIFEST.json durably. Its rename is what makes `folder` a checkpoint."""
    part = folder / f".{NAME}.part"
    write_file(files, part, text)
    files.rename(part, folder / NAME)
    files.sync_folder(folder)
