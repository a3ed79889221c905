"""Polyfleet's folders and files on a machine, and who may access them."""

import os
import stat
import tempfile
import threading
from pathlib import Path
from typing import IO

from cluster.errors import UserError

DEFAULT_HOME = ".polyfleet"
HOME_FILES = {"fleet.lock", "server-start.lock", "server.lock", "ray-token", "fleet-identity"}
"""Files of a home. A folder with one of them is in use by Polyfleet already."""


MAX_TEMPORARY_LENGTH = 24
"""Maximum length of TMPDIR in bytes. A Unix socket's path has at most 107 bytes, 65 of them below Ray's own folder."""


def make_short_folder(prefix: str) -> Path:
    """Create a folder of mode 0700 whose path is short enough for sockets.

    It is in TMPDIR, or in /tmp if TMPDIR is too long.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > MAX_TEMPORARY_LENGTH:
        parent = "/tmp"  # noqa: S108 - mkdtemp creates a private folder there
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def home() -> Path:
    """Return the folder of this user's server and embedded fleet: POLYFLEET_HOME, else ~/.polyfleet.

    It contains tokens, so it is created with mode 0700. This function does not create it.
    """
    return Path(os.environ.get("POLYFLEET_HOME") or Path.home() / DEFAULT_HOME).expanduser().absolute()


def cache() -> Path:
    """Return the folder of environments and exported code, which can be created again.

    POLYFLEET_CACHE, else $XDG_CACHE_HOME/polyfleet, else ~/.cache/polyfleet. This function does not create it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("POLYFLEET_CACHE") or Path(base) / "polyfleet").expanduser().absolute()


def private_dir(path: Path) -> Path:
    """Make sure that `path` is a folder that only its owner can access; create it if missing.

    Its missing parents are created too. An existing folder with a wider mode is closed, and so is our home if the
    folder is in it. Raises UserError if another user owns it, or if it contains other things than ours: closing `/` or
    `/tmp` would break the machine.
    """
    if _make(path):
        return path
    check_owner(path)
    status = path.stat()
    if status.st_mode & 0o077:
        if home() in path.parents:
            private_dir(home())
        elif not _is_parent_private(path) and not _is_ours(path):
            raise UserError(
                f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):04o}) "
                "and is not a Polyfleet folder",
                f"name a folder of its own, such as {path / 'polyfleet'}, or close it: chmod 700 {path}",
            )
        path.chmod(0o700)
    return path


def check_owner(path: Path) -> None:
    """Raise UserError if another user owns `path`: its processes, ports and tokens could be forged."""
    try:
        owner = path.stat().st_uid
    except FileNotFoundError:
        return
    if owner != os.geteuid():
        raise UserError(
            f"{path} belongs to user {owner}, this process runs as user {os.geteuid()}",
            "set POLYFLEET_HOME to a folder of your own",
        )


def _is_ours(path: Path) -> bool:
    """Return whether a folder is ours by its name or an entry, or is empty.

    Never `/` or a folder directly below it.
    """
    if path.parent == path.parent.parent:
        return False
    names = {entry.name for entry in path.iterdir()}
    return path.name == DEFAULT_HOME or not names or bool(names & HOME_FILES)


def _make(path: Path, create_parents: bool = True) -> bool:
    """Create a folder and its parents with mode 0700, whatever the umask.

    Return False if it exists already.

    Raises OSError, e.g. if a file has that name, or in /proc.
    """
    try:
        path.mkdir(0o700)
    except FileNotFoundError:
        if not create_parents:
            raise
        _make(path.parent)
        return _make(path, create_parents=False)
    except FileExistsError:
        if not path.is_dir():
            raise
        return False
    return True


def _is_parent_private(path: Path) -> bool:
    """Return whether one of its parents is ours and already keeps other users out."""
    parents = (folder.stat() for folder in path.resolve().parents)
    return any(status.st_uid == os.geteuid() and not status.st_mode & 0o077 for status in parents)


def cache_dir(name: str) -> Path:
    """Return a folder of the cache that no other user can change; create it if missing.

    It contains code and interpreters. Raises UserError if another user owns it, or if any user could replace it.
    """
    folder = cache() / name
    if _make(folder):
        return folder
    status, parent_status = folder.stat(), folder.parent.stat()
    if status.st_uid != os.geteuid():
        raise UserError(f"{folder} belongs to user {status.st_uid}", "set POLYFLEET_CACHE to a folder of your own")
    if parent_status.st_mode & stat.S_IWOTH and not parent_status.st_mode & stat.S_ISVTX:
        raise UserError(f"any user of this machine can replace {folder}", f"close it: chmod go-w {folder.parent}")
    if status.st_mode & 0o022:
        folder.chmod(status.st_mode & ~0o022)
    return folder


def storage_dir(path: Path) -> Path:
    """Return a checkpoint folder that a user named.

    A missing one is created, private; an existing one is not changed.

    Raises UserError for a folder that cannot be a storage: `/`, a user's home, a shared temporary folder, or read-only.
    """
    if _make(path):
        return path
    remedy = f"name a folder in it, such as {path / 'polyfleet'}: `polyfleet up` creates it for you alone"
    if path.resolve() in (Path("/"), Path.home().resolve()):
        raise UserError(f"{path} contains more than checkpoints", remedy)
    mode = path.stat().st_mode
    if mode & stat.S_ISVTX and mode & stat.S_IWOTH:
        raise UserError(f"in {path} any user of this machine can put a checkpoint of any name", remedy)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"{path} cannot be written by user {os.geteuid()}", "name a folder that the fleet can write")
    return path


def open_private(path: Path, flags: int = os.O_RDWR) -> IO[bytes]:
    """Open a private file, without following a link.

    A missing one is created, mode 0600 in a folder of mode 0700.
    """
    private_dir(path.parent)
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "ab" if flags & os.O_APPEND else "r+b", buffering=0)


def umask() -> int:
    """Return this process's umask.

    It can only be read by setting it: files that other threads create in that moment are private.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_durably(path: Path) -> None:
    """Sync a file's bytes, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Replace `path` atomically by a file of mode 0600."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    part.replace(path)
