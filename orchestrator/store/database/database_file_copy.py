"""Copy a SQLite database to one file of mode 0600, which appears only when it is complete and on disk."""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from cluster.errors import FleetError, UserError
from cluster.paths import write_durably
from orchestrator.store.database import sqlite

log = logging.getLogger(__name__)

MAX_UPGRADE_COPIES = 2


def stamp() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"


def copy_before_upgrade(path: Path, version: int) -> Path:
    """Copy the database to its folder before an upgrade; keep the newest two such copies."""
    target = path.with_name(f"{path.stem}-version-{version}-{stamp()}.db")
    for unfinished in path.parent.glob(f".{path.stem}-version-*.part"):
        unfinished.unlink(missing_ok=True)
    copy(path, target)
    log.info("upgrading the tables of %s; a copy of the database before the upgrade is %s", path, target)
    for old in sqlite.upgrade_copies(path)[MAX_UPGRADE_COPIES:]:
        old.unlink(missing_ok=True)
    return target


def copy(path: Path, target: Path) -> None:
    """Copy the current state of the database without blocking its writers. Raises FleetError or UserError."""
    if not path.exists():
        raise UserError(
            f"there is no database {path}", "start a server with `polyfleet server start`: it creates the database"
        )
    try:
        with new_file(target) as part, closing(sqlite.reader(path)) as source:
            source.execute("VACUUM INTO ?", [str(part)]).close()
            make_single_file(part)
    except sqlite3.Error as e:
        raise sqlite.translate_copy_error(e, path, target) from e


def make_single_file(part: Path) -> None:
    """Make the copy a single file without a write-ahead log and without the token of the server that writes."""
    with closing(sqlite3.connect(part, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE").close()
        connection.execute("PRAGMA synchronous=FULL").close()
        connection.execute("DELETE FROM writer").close()


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Yield an empty file to write; afterwards it becomes `target`, once it is on disk.

    Raises UserError if `target` already exists, FleetError if it cannot be written.
    """
    if target.exists():
        raise UserError(f"{target} already exists", "name another file: a backup is never overwritten")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield part
        write_durably(part)
        _link(part, target)
    except OSError as e:
        raise FleetError(f"{target} cannot be written: {e.strerror or e}", "name a file on another disk") from e
    finally:
        for leftover in (part, part.with_name(f"{part.name}-journal")):
            with suppress(OSError):
                leftover.unlink(missing_ok=True)
    write_durably(target.parent)


def _link(part: Path, target: Path) -> None:
    """Give the file its name without overwriting another. Some file systems have no hard links."""
    try:
        target.hardlink_to(part)
    except FileExistsError:
        raise UserError(f"{target} already exists", "name another file: a backup is never overwritten") from None
    except OSError:
        part.rename(target)
