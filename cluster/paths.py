"""Where Polyfleet keeps things on a machine, and for whom. Nothing is created by asking."""

import os
import stat
import tempfile
import threading
from pathlib import Path
from typing import IO

from cluster.errors import UserError

DEFAULT_HOME = ".polyfleet"
MARKS = {"fleet.lock", "server-start.lock", "server.lock", "ray-token", "fleet-identity"}
"""Files of a home: one of them shows that we use that folder already."""


MAX_TEMPORARY_LENGTH = 24
"""Of TMPDIR, in bytes. A Unix socket's path has at most 107 bytes; those of Ray have 65 below its own folder."""


def make_short_folder(prefix: str) -> Path:
    """A new folder of mode 0700 whose path leaves room for sockets: in TMPDIR, or in /tmp if TMPDIR is too long."""
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) > MAX_TEMPORARY_LENGTH:
        place = "/tmp"  # noqa: S108 - mkdtemp makes a folder of our own there
    return Path(tempfile.mkdtemp(prefix=prefix, dir=place))


def home() -> Path:
    """State of this user's server and embedded fleet: POLYFLEET_HOME, else ~/.polyfleet. Holds tokens, so it is made
    0700.
    """
    return Path(os.environ.get("POLYFLEET_HOME") or Path.home() / DEFAULT_HOME).expanduser().absolute()


def cache() -> Path:
    """What can be made again: environments and code folders. POLYFLEET_CACHE, else $XDG_CACHE_HOME/polyfleet, else
    ~/.cache/polyfleet.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("POLYFLEET_CACHE") or Path(base) / "polyfleet").expanduser().absolute()


def private_dir(path: Path) -> Path:
    """A folder of ours, open to its owner only; what is missing of `path` is made so.

    One that exists and is open is closed, with our home if it lies in it. Raises UserError where another user owns it,
    and where it holds what is not ours: closing `/` or `/tmp` would break the machine.
    """
    if _make(path):
        return path
    check_owner(path)
    found = path.stat()
    if found.st_mode & 0o077:
        if home() in path.parents:
            private_dir(home())
        elif not _closed_above(path) and not _is_ours(path):
            raise UserError(
                f"{path} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}) and is no folder of Polyfleet",
                f"name a folder of its own, such as {path / 'polyfleet'}, or close it: chmod 700 {path}",
            )
        path.chmod(0o700)
    return path


def check_owner(path: Path) -> None:
    """Raises UserError where another user owns `path`: what it says of processes, ports and tokens may be a trap."""
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
    """Its name or an entry says that we use it already, or nothing is in it. Never `/` or a folder right below it."""
    if path.parent == path.parent.parent:
        return False
    names = {entry.name for entry in path.iterdir()}
    return path.name == DEFAULT_HOME or not names or bool(names & MARKS)


def _make(path: Path, above: bool = True) -> bool:
    """Make the folder and those above it, closed to others whatever the umask. False when it is there already.

    Raises OSError, as for a file in its place, and where no folder can be made, as in /proc.
    """
    try:
        path.mkdir(0o700)
    except FileNotFoundError:
        if not above:
            raise
        _make(path.parent)
        return _make(path, above=False)
    except FileExistsError:
        if not path.is_dir():
            raise
        return False
    return True


def _closed_above(path: Path) -> bool:
    """A folder above it is ours and keeps everybody else out: closing this one takes nothing from them."""
    above = (folder.stat() for folder in path.resolve().parents)
    return any(found.st_uid == os.geteuid() and not found.st_mode & 0o077 for found in above)


def cache_dir(name: str) -> Path:
    """A folder of the cache that nobody else can change: code and interpreters lie there. Made closed to others.

    Raises UserError where it is another user's, or where any user could exchange it.
    """
    folder = cache() / name
    if _make(folder):
        return folder
    found, above = folder.stat(), folder.parent.stat()
    if found.st_uid != os.geteuid():
        raise UserError(f"{folder} belongs to user {found.st_uid}", "set POLYFLEET_CACHE to a folder of your own")
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise UserError(f"any user of this machine can exchange {folder}", f"close it: chmod go-w {folder.parent}")
    if found.st_mode & 0o022:
        folder.chmod(found.st_mode & ~0o022)
    return folder


def storage_dir(path: Path) -> Path:
    """A checkpoint folder that somebody named: made closed to others if it is missing, never changed if it is there.

    Raises UserError for one that cannot be a storage: `/`, a user's home, a shared temporary folder, or read-only.
    """
    if _make(path):
        return path
    remedy = f"name a folder in it, such as {path / 'polyfleet'}: it is made for you alone"
    if path.resolve() in (Path("/"), Path.home().resolve()):
        raise UserError(f"{path} holds more than checkpoints", remedy)
    mode = path.stat().st_mode
    if mode & stat.S_ISVTX and mode & stat.S_IWOTH:
        raise UserError(f"in {path} any user of this machine can put a checkpoint of any name", remedy)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"{path} cannot be written by user {os.geteuid()}", "name a folder that the fleet can write")
    return path


def open_private(path: Path, flags: int = os.O_RDWR) -> IO[bytes]:
    """A file of ours, made with mode 0600 in a folder of mode 0700 if it is missing; no link is followed."""
    private_dir(path.parent)
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "ab" if flags & os.O_APPEND else "r+b", buffering=0)


def umask() -> int:
    """This process's. It can only be read by setting it: for a moment what other threads make is ours alone."""
    found = os.umask(0o077)
    os.umask(found)
    return found


def write_durably(path: Path) -> None:
    """The file's bytes, or the names in the folder, are on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Replace `path` at once by a file of mode 0600: a reader sees the old text or the new, never half."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    part.replace(path)
