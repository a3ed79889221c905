"""A backup in the place of the store: all of it or nothing, and what was there is kept under another name."""

import os
import shutil
import sqlite3
import tempfile
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, Connection, inspect, select, text
from sqlalchemy.exc import DBAPIError

from cluster.errors import Conflict, FleetError, UserError
from cluster.paths import write_durably
from orchestrator.store import database_file_copy, postgresql, schema, sqlite
from orchestrator.store.backup import copy_rows, file_engine, snapshot, version_in
from orchestrator.store.database import is_sqlite, name_of, parsed, sqlite_url, translate_error


@dataclass(frozen=True, slots=True)
class Backup:
    """`identity` is "" in a file that is older than identities."""

    file: Path
    version: int
    identity: str


def restore(url: str, file: Path, replace_other: bool = False) -> str:
    """Make `file` the store; the name under which the one before is kept, "" where there was none.

    Raises UserError for a file that is no backup, Conflict for one of another store unless `replace_other`, FleetError
    when a server has the database open, or the file is damaged or newer. The store is as it was then.
    """
    found, backup = parsed(url), inspected(file)
    try:
        if is_sqlite(found):
            return _into_file(sqlite.path_of(found), backup, replace_other)
        return _into_postgresql(found, backup, replace_other)
    except DBAPIError as e:
        raise translate_error(e, found) from e
    except sqlite3.Error as e:
        raise sqlite.translate_error(e, file) from e
    except OSError as e:
        said = f"{name_of(found)} cannot be replaced: {e.strerror or e}"
        raise FleetError(said, "check the disk and the folder") from e


def inspected(file: Path) -> Backup:
    """Of a file that is whole. Raises UserError or FleetError for another, as `restore` says."""
    if not file.is_file():
        raise UserError(f"there is no file {file}", "`polyfleet server backup` makes one")
    with snapshot(sqlite_url(file)) as connection:
        if (found := connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar()) != "ok":
            raise FleetError(f"{file} is damaged: {' '.join(str(found).split())}", "restore another backup")
        return Backup(file, version_in(connection, str(file)), _identity(connection))


def _identity(connection: Connection) -> str:
    if not inspect(connection).has_table(schema.identity.name):
        return ""
    return connection.scalar(select(schema.identity.c.name)) or ""


def _refuse_other(backup: Backup, identity: str, where: str, replace_other: bool) -> None:
    if identity and backup.identity != identity and not replace_other:
        raise Conflict(
            f"{backup.file} is a backup of another store than {where}",
            "choose another file; with --replace-other it is restored nevertheless, and this one is kept",
        )


def _into_file(path: Path, backup: Backup, replace_other: bool) -> str:
    with sqlite.lock(path):
        _refuse_other(backup, _identity_of_file(path), str(path), replace_other)
        staged = path.with_name(f".{path.name}.restoring")
        _stage(backup, staged)
        return _replace(path, staged)


def _identity_of_file(path: Path) -> str:
    """ "" where there is none, or none that can be read: that is why one restores."""
    if path.exists():
        with suppress(FleetError), snapshot(sqlite_url(path)) as connection:
            return _identity(connection)
    return ""


def _stage(backup: Backup, staged: Path) -> None:
    """A copy of the backup with the tables of today, on disk."""
    for left in (staged, staged.with_name(f"{staged.name}-journal")):
        left.unlink(missing_ok=True)
    os.close(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(sqlite.reader(backup.file)) as source:
        source.execute("VACUUM INTO ?", [str(staged)]).close()
    database_file_copy.finish(staged)
    with file_engine(staged).begin() as connection:
        schema.prepare(connection, str(backup.file), lambda _: None)
    write_durably(staged)


def _replace(path: Path, staged: Path) -> str:
    """The name of what was there. Until the last step, which is one rename, it is the store still."""
    beside = [path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm")]
    kept = path.with_name(f"{path.stem}-replaced-{database_file_copy.stamp()}.db")
    if is_there := path.exists():
        _fold_log(path)
        _forget_unfinished(path)
        _keep(path, kept)
        if beside[0].exists():  # of a database so damaged that its log cannot be folded into it
            _keep(beside[0], kept.with_name(f"{kept.name}-wal"))
        write_durably(path.parent)
    for file in beside:
        file.unlink(missing_ok=True)
    staged.replace(path)
    write_durably(path.parent)
    return str(kept) if is_there else ""


def _fold_log(path: Path) -> None:
    """What a killed server left in the log belongs to the database, and would be taken for a part of the next one."""
    with suppress(sqlite3.Error), closing(sqlite.plain_connection(path)) as connection:
        connection.execute("PRAGMA synchronous=FULL").close()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()


def _forget_unfinished(path: Path) -> None:
    """A restore that was killed before its last step has left a second name of the store."""
    for kept in path.parent.glob(f"{path.stem}-replaced-*.db"):
        if kept.samefile(path):
            kept.unlink()


def _keep(file: Path, under: Path) -> None:
    try:
        under.hardlink_to(file)
    except OSError:  # a file system without hard links
        os.close(os.open(under, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        shutil.copyfile(file, under)
        write_durably(under)


def _into_postgresql(url: URL, backup: Backup, replace_other: bool) -> str:
    """In one transaction. The tables of before go into a schema of their own."""
    name = name_of(url)
    with tempfile.TemporaryDirectory(prefix="polyfleet-restore-") as folder, postgresql.locked(url):
        staged = Path(folder) / "staged.db"
        _stage(backup, staged)
        writer, _ = postgresql.engines(url)
        with writer.begin() as target, snapshot(sqlite_url(staged)) as source:
            postgresql.check(target, name)
            there = set(inspect(target).get_table_names())
            kept = _moved(target, there, backup, name, replace_other)
            schema.create(target)
            copy_rows(source, target)
    return kept


def _moved(target: Connection, there: set[str], backup: Backup, name: str, replace_other: bool) -> str:
    if schema.schema_version.name not in there:
        schema.check_own_tables(there, name)
        return ""
    schema.version_of(target, name)
    _refuse_other(backup, _identity(target), name, replace_other)
    kept = f"polyfleet_replaced_{database_file_copy.stamp().replace('.', '_').lower()}"
    target.execute(text(f'CREATE SCHEMA "{kept}"'))
    for table in sorted(there & set(schema.metadata.tables)):
        target.execute(text(f'ALTER TABLE "{table}" SET SCHEMA "{kept}"'))
    return f"schema {kept} of {name}"
