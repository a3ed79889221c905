"""The Unix socket of a home: other users reach neither its folder nor, when the server has died, its place.

A path in a socket's address ends at 107 bytes (103 on macOS). Longer ones are reached through a descriptor of their
folder, which also makes sure that the folder that was looked at is the one that is used.
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
LONGEST_BYTES = 103
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
CREDENTIALS = struct.Struct("3i")
"""What SO_PEERCRED gives: pid, uid, gid (Linux, unix(7))."""


@contextmanager
def listener(home: Path) -> Iterator[tuple[socket.socket, Path]]:
    """Listens on a socket of mode 0600 and yields it with its path. Call it holding the server's lock: what lies there
    is a dead server's.

    Where the home's file system has no sockets, or its path is too long, a short folder of its own takes it.
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
    """A descriptor of the folder of the socket `path`. Raises FleetError unless it is ours and closed to others: only
    then nobody else can have put the socket there. Raises OSError when it is gone.
    """
    descriptor = os.open(path.parent, OPEN_FOLDER)
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077:
        return descriptor
    os.close(descriptor)
    whose = f"owner uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"
    raise FleetError(
        f"the folder {path.parent} of the server's socket is open to others ({whose})",
        f"as its owner, run `polyfleet server stop`, `chmod 700 {path.parent}`, then this command again",
    )


def short_socket_path(descriptor: int, path: Path) -> str:
    """The socket's path by way of its open folder, where the system has such paths."""
    near = Path(f"/proc/self/fd/{descriptor}")
    return str(near / path.name) if near.is_dir() else str(path)


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Raises OSError when nobody listens there."""
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
    """The user at the other end of a Unix socket; None where the system does not tell."""
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
        short = len(os.fsencode(path)) <= LONGEST_BYTES
        listening.bind(str(path) if short else short_socket_path(descriptor, path))
        os.chmod(NAME, 0o600, dir_fd=descriptor)
    finally:
        os.close(descriptor)
