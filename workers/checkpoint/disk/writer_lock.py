"""Allow one writer per folder of checkpoints. The lock ends with its process, however that ends."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import Conflict

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
