"""Everything specific to SQLite is in this file.

Only one connection writes and checkpoints: SQLite 3.7.0 to 3.51.2 can corrupt a database in WAL mode if two connections
write or checkpoint at the same time (fixed in 3.51.3), and Debian 12 ships 3.40.1. For the same reason, a lock file
beside the database keeps a second process out. No mmap: a disk error would raise a signal instead of an error.
"""

import fcntl
import os
import sqlite3
import time
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool, QueuePool

from cluster.errors import FleetError, UserError

BACKUPS = "backups"
BUSY_MS = 5000
MAX_CHECK_S = 0.5
CHECK_STEPS = 10_000
"""Instructions of SQLite's virtual machine between two checks of the time."""
COMMON = ("PRAGMA mmap_size=0", f"PRAGMA busy_timeout={BUSY_MS}", "PRAGMA foreign_keys=ON")
WRITER = ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "PRAGMA fullfsync=ON", "PRAGMA wal_autocheckpoint=1000")
READER = ("PRAGMA query_only=ON", "PRAGMA wal_autocheckpoint=0")
DISK_FULL_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
DAMAGE_CODES = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


def file_of(url: URL) -> Path:
    if not url.database or url.database == ":memory:":
        raise UserError("a store in memory would lose every job", "name a file: sqlite:////absolute/path.db")
    return Path(url.database).absolute()


def lock(path: Path) -> IO[bytes]:
    """Lock the database until the returned file is closed; the kernel also releases the lock of a killed process."""
    file = path.with_name(path.name + ".lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise FleetError(f"another server has {path} open", "stop it first with `polyfleet server stop`") from None
    return file


def check(connection: Connection) -> None:
    """Check for damage for half a second, enough for a small database; `verify` checks all of a large one.

    Raises FleetError if it is damaged.
    """
    raw: Any = connection.connection.driver_connection
    deadline = time.monotonic() + MAX_CHECK_S
    raw.set_progress_handler(lambda: time.monotonic() > deadline, CHECK_STEPS)
    try:
        result = raw.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.OperationalError as e:
        if e.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        result = "ok"
    finally:
        raw.set_progress_handler(None, 0)
    if result != "ok":
        raise damaged_error(file_of(connection.engine.url), " ".join(result.split()))


def reader(path: Path) -> sqlite3.Connection:
    """Read-only connection, also to a database that a server has open. It never checkpoints."""
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None)
    connection.text_factory = _text
    connection.execute(f"PRAGMA busy_timeout={BUSY_MS}").close()
    return connection


def plain_connection(path: Path) -> sqlite3.Connection:
    """Connection to a file that no server has open or can open."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.text_factory = _text
    return connection


def _open_existing(path: Path) -> sqlite3.Connection:
    """Connection to an existing file: if the database was removed, no new, empty one is created."""
    return sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, check_same_thread=False)


def file_identity(path: Path) -> tuple[int, int] | None:
    """Identity of the file at a path, device and inode; None if it does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


class ReplacedError(FleetError):
    """The file at the path is not the one that this server opened; the store accepts no more writes."""


def replaced_error(path: Path) -> ReplacedError:
    return ReplacedError(
        f"the job store {path} was removed or replaced while this server had it open",
        "stop the server, then put the file back or restore a backup: `polyfleet server restore FILE`",
    )


def engines(url: URL) -> tuple[Engine, Engine]:
    """(writer, readers). Only its owner can read the file; SQLite gives the files beside it the same mode."""
    path = file_of(url)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    writer = create_engine(url, poolclass=NullPool, creator=lambda: _open_existing(path))
    readers = create_engine(
        url, poolclass=QueuePool, pool_size=8, max_overflow=24, creator=lambda: _open_existing(path)
    )
    _configure(writer, (*COMMON, *WRITER), begin="BEGIN IMMEDIATE")
    _configure(readers, (*COMMON, *READER), begin="BEGIN")
    return writer, readers


def disk_space(path: Path) -> tuple[int, int]:
    """(bytes of the database and its log, bytes free on its disk)."""
    free = os.statvfs(path.parent)
    files = (path, path.with_name(path.name + "-wal"))
    return sum(f.stat().st_size for f in files if f.exists()), free.f_bavail * free.f_frsize


def _text(data: bytes) -> str | bytes:
    """Decode text. SQLite stores any bytes as text: invalid UTF-8 must be an error of its row, not of the result."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def translate_error(error: BaseException, path: Path) -> FleetError:
    """Translate an error of SQLite to a message for users."""
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if primary in DISK_FULL_CODES:
        free = os.statvfs(path.parent)
        mib = free.f_bavail * free.f_frsize / 2**20
        return FleetError(
            f"the job store {path} cannot be written ({error}; {mib:.0f} MiB are free on its disk)",
            "free disk space there: acknowledged jobs are safe, and the store then continues by itself",
        )
    if primary in DAMAGE_CODES:
        return damaged_error(path, str(error))
    if primary == sqlite3.SQLITE_BUSY:
        return FleetError(f"the job store {path} is locked by another program", "close the program that has it open")
    return FleetError(f"the job store {path} failed: {error}", "see the server's log for details")


def upgrade_copies(path: Path) -> list[Path]:
    """Copies of the database that upgrades have made, newest first."""
    return sorted(path.parent.glob(f"{path.stem}-version-*-*.db"), key=_age, reverse=True)


def newest_copy(path: Path) -> Path | None:
    """The newest copy that Polyfleet made, in an upgrade or by `backup` without a file name."""
    copies = [*upgrade_copies(path), *(path.parent / BACKUPS).glob("*.db")]
    return max(copies, key=_age, default=None)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def translate_copy_error(error: sqlite3.Error, path: Path, target: Path) -> FleetError:
    """Like `translate_error`, for copying `path` to `target`, whose disk may be full."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code & 0xFF in DISK_FULL_CODES and code != sqlite3.SQLITE_IOERR_READ:
        return FleetError(f"{target} cannot be written: {error}", "name a file on a disk with more free space")
    return translate_error(error, path)


class DamagedFile(FleetError):
    """SQLite cannot read the database completely."""


def damaged_error(path: Path, reason: str) -> DamagedFile:
    newest = newest_copy(path)
    backup = f"the newest one here is {newest}" if newest else "there is none in its folder"
    remedy = f"restore a backup with `polyfleet server restore FILE` ({backup}), or move the file away"
    return DamagedFile(f"{path} is damaged or not a job store ({reason})", remedy)


def _configure(engine: Engine, pragmas: tuple[str, ...], begin: str) -> None:
    """Begin transactions explicitly, instead of when the driver detects a write."""

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.text_factory = _text
        for pragma in pragmas:
            connection.execute(pragma).close()

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Any) -> None:
        connection.exec_driver_sql(begin)
