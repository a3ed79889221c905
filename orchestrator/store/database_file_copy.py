"""Copies of a SQLite database as one file of mode 0600: whole and on disk, or not there."""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from cluster.errors import FleetError, UserError
from cluster.paths import write_durably
from orchestrator.store import sqlite

log = logging.getLogger(__name__)

AUTOMATIC_KEPT = 2


def stamp() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"


def before_upgrade(path: Path, version: int) -> Path:
    """Keep the database as it is, beside it; of such copies the newest two."""
    target = path.with_name(f"{path.stem}-version-{version}-{stamp()}.db")
    for unfinished in path.parent.glob(f".{path.stem}-version-*.part"):
        unfinished.unlink(missing_ok=True)
    copy(path, target)
    log.info("the tables of %s are being brought up to date; %s is the database as it was", path, target)
    for old in sqlite.automatic_backup_path(path)[AUTOMATIC_KEPT:]:
        old.unlink(missing_ok=True)
    return target


def copy(path: Path, target: Path) -> None:
    """Of the database as it is now; whoever writes to it meanwhile is not held up. Raises FleetError or UserError."""
    if not path.exists():
        raise UserError(f"there is no database {path}", "the server makes it when it starts for the first time")
    try:
        with published(target) as part, closing(sqlite.reader(path)) as source:
            source.execute("VACUUM INTO ?", [str(part)]).close()
            finish(part)
    except sqlite3.Error as e:
        raise sqlite.translate_copy_error(e, path, target) from e


def finish(part: Path) -> None:
    """One file, without a log beside it, and without the token by which a server knows that it is the only one."""
    with closing(sqlite3.connect(part, isolation_level=None)) as made:
        made.execute("PRAGMA journal_mode=DELETE").close()
        made.execute("PRAGMA synchronous=FULL").close()
        made.execute("DELETE FROM writer").close()


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """An empty file to write to, which becomes `target` once it is complete and on disk.

    Raises UserError if `target` is there already, FleetError if the disk does not take it.
    """
    if target.exists():
        raise UserError(f"{target} is there already", "name another file: a backup is never overwritten")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield part
        write_durably(part)
        _link(part, target)
    except OSError as e:
        raise FleetError(f"{target} cannot be written: {e.strerror or e}", "name a file on another disk") from e
    finally:
        for rest in (part, part.with_name(f"{part.name}-journal")):
            with suppress(OSError):
                rest.unlink(missing_ok=True)
    write_durably(target.parent)


def _link(part: Path, target: Path) -> None:
    """Never over a file of that name; some file systems have no hard links."""
    try:
        target.hardlink_to(part)
    except FileExistsError:
        raise UserError(f"{target} is there already", "name another file: a backup is never overwritten") from None
    except OSError:
        part.rename(target)
