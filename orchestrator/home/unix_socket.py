"""Unix socket of a home, in a folder that other users cannot enter, so that none can replace a dead server's socket.

The path in a socket's address has at most 107 bytes (103 on macOS). Longer ones are reached through a descriptor of
their folder, which also ensures that the folder that was checked is the one that is used.
"""

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.errors import FleetError
from cluster.paths import make_short_folder

NAME = "server.sock"
MAX_PATH_BYTES = 103
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
CREDENTIALS = struct.Struct("3i")
"""Result of SO_PEERCRED: pid, uid, gid (Linux, unix(7))."""


@contextmanager
def listener(home: Path) -> Iterator[tuple[socket.socket, Path]]:
    """Listen on a socket of mode 0600; yield it and its path. The caller must hold the server's lock: an existing
    socket is that of a dead server and is replaced.

    If the home's file system does not support sockets, or its path is too long, the socket is in a new short folder.
    """
    folder, own = home, None
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            _bind(listening, home)
        except OSError:
            folder = own = make_short_folder("pf-server-")
            _bind(listening, folder)
        try:
            listening.listen()
            yield listening, folder / NAME
        finally:
            (folder / NAME).unlink(missing_ok=True)
            if own is not None:
                own.rmdir()


def open_folder(path: Path) -> int:
    """Open the folder of the socket `path`; return the descriptor. Raises FleetError unless this user owns it and it is
    closed to others: only then no other user can have created the socket. Raises OSError if it does not exist.
    """
    descriptor = os.open(path.parent, OPEN_FOLDER)
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077:
        return descriptor
    os.close(descriptor)
    owner = f"owner uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
    raise FleetError(
        f"other users can access the folder {path.parent} of the server's socket ({owner})",
        f"as its owner, run `polyfleet server stop`, `chmod 700 {path.parent}`, then this command again",
    )


def short_socket_path(descriptor: int, path: Path) -> str:
    """The socket's path through its open folder, if the system has such paths."""
    near = Path(f"/proc/self/fd/{descriptor}")
    return str(near / path.name) if near.is_dir() else str(path)


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Connect to the socket. Raises OSError if no process listens there."""
    descriptor = open_folder(path)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(short_socket_path(descriptor, path))
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(descriptor)
    return connection


def peer_uid(connection: socket.socket) -> int | None:
    """User id of the process at the other end of a Unix socket; None if the system does not provide it."""
    if connection.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    _, uid, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return int(uid)


def _bind(listening: socket.socket, folder: Path) -> None:
    descriptor = os.open(folder, OPEN_FOLDER)
    try:
        with suppress(FileNotFoundError):
            os.unlink(NAME, dir_fd=descriptor)
        path = folder / NAME
        short = len(os.fsencode(path)) <= MAX_PATH_BYTES
        listening.bind(str(path) if short else short_socket_path(descriptor, path))
        os.chmod(NAME, 0o600, dir_fd=descriptor)
    finally:
        os.close(descriptor)
