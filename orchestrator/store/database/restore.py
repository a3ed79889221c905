"""Replace the job store by a backup, atomically, and keep the previous store under another name."""

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
from orchestrator.store.database import database_file_copy, postgresql, schema, sqlite
from orchestrator.store.database.backup import copy_rows, file_engine, snapshot, version_in
from orchestrator.store.database.database import is_sqlite, name_of, parse_url, sqlite_url, translate_error


@dataclass(frozen=True, slots=True)
class Backup:
    """A checked backup file, with the version of its tables and the identity of its store."""

    file: Path
    version: int
    identity: str


def restore(url: str, file: Path, replace_other: bool = False) -> str:
    """Make `file` the store. Return the new name of the previous one, "" if there was none.

    Raises UserError for a file that is not a backup, Conflict for a backup of another store unless `replace_other`,
    FleetError if a server has the database open, or the file is damaged or newer. The store is then unchanged.
    """
    database_url, backup = parse_url(url), check_backup(file)
    try:
        if is_sqlite(database_url):
            return _into_file(sqlite.file_of(database_url), backup, replace_other)
        return _into_postgresql(database_url, backup, replace_other)
    except DBAPIError as e:
        raise translate_error(e, database_url) from e
    except sqlite3.Error as e:
        raise sqlite.translate_error(e, file) from e
    except OSError as e:
        message = f"{name_of(database_url)} cannot be replaced: {e.strerror or e}"
        raise FleetError(message, "check the disk and the folder") from e


def check_backup(file: Path) -> Backup:
    """Check a backup file and return its description. Raises UserError or FleetError as `restore` does."""
    if not file.is_file():
        raise UserError(f"there is no file {file}", "name a backup; `polyfleet server backup` writes one")
    with snapshot(sqlite_url(file)) as connection:
        if (check := connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar()) != "ok":
            raise FleetError(f"{file} is damaged: {' '.join(str(check).split())}", "restore another backup")
        return Backup(file, version_in(connection, str(file)), _identity(connection))


def _identity(connection: Connection) -> str:
    return connection.scalar(select(schema.identity.c.name)) or ""


def _check_identity(backup: Backup, identity: str, where: str, replace_other: bool) -> None:
    if identity and backup.identity != identity and not replace_other:
        raise Conflict(
            f"{backup.file} is a backup of another store than {where}",
            "choose another file, or add --force: it keeps the current store under another name",
        )


def _into_file(path: Path, backup: Backup, replace_other: bool) -> str:
    with sqlite.lock(path):
        _check_identity(backup, _identity_of_file(path), str(path), replace_other)
        staged = path.with_name(f".{path.name}.restoring")
        _stage(backup, staged)
        return _replace(path, staged)


def _identity_of_file(path: Path) -> str:
    """Identity of a store; "" if the file does not exist or is unreadable, which is a reason to restore a backup."""
    if path.exists():
        with suppress(FleetError), snapshot(sqlite_url(path)) as connection:
            return _identity(connection)
    return ""


def _stage(backup: Backup, staged: Path) -> None:
    """Write a copy of the backup with the tables of the current version to disk."""
    for leftover in (staged, staged.with_name(f"{staged.name}-journal")):
        leftover.unlink(missing_ok=True)
    os.close(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(sqlite.reader(backup.file)) as source:
        source.execute("VACUUM INTO ?", [str(staged)]).close()
    database_file_copy.make_single_file(staged)
    with file_engine(staged).begin() as connection:
        schema.prepare(connection, str(backup.file), lambda _: None)
    write_durably(staged)


def _replace(path: Path, staged: Path) -> str:
    """Replace the store; return the name of the previous one, which stays unchanged until the last step, a rename."""
    log_files = [path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm")]
    previous = path.with_name(f"{path.stem}-replaced-{database_file_copy.stamp()}.db")
    if is_there := path.exists():
        _checkpoint_log(path)
        _remove_unfinished(path)
        _keep_as(path, previous)
        if log_files[0].exists():  # the database is so damaged that its log could not be checkpointed into it
            _keep_as(log_files[0], previous.with_name(f"{previous.name}-wal"))
        write_durably(path.parent)
    for file in log_files:
        file.unlink(missing_ok=True)
    staged.replace(path)
    write_durably(path.parent)
    return str(previous) if is_there else ""


def _checkpoint_log(path: Path) -> None:
    """Checkpoint the log of a killed server: it belongs to this database, and SQLite would apply it to the next."""
    with suppress(sqlite3.Error), closing(sqlite.plain_connection(path)) as connection:
        connection.execute("PRAGMA synchronous=FULL").close()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()


def _remove_unfinished(path: Path) -> None:
    """Remove the second name of the store that a restore left which was killed before its last step."""
    for name in path.parent.glob(f"{path.stem}-replaced-*.db"):
        if name.samefile(path):
            name.unlink()


def _keep_as(file: Path, under: Path) -> None:
    try:
        under.hardlink_to(file)
    except OSError:  # a file system without hard links
        os.close(os.open(under, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        shutil.copyfile(file, under)
        write_durably(under)


def _into_postgresql(url: URL, backup: Backup, replace_other: bool) -> str:
    """Restore in one transaction. The previous tables are moved into a new schema."""
    name = name_of(url)
    with tempfile.TemporaryDirectory(prefix="polyfleet-restore-") as folder, postgresql.advisory_lock(url):
        staged = Path(folder) / "staged.db"
        _stage(backup, staged)
        writer, _ = postgresql.engines(url)
        with writer.begin() as target, snapshot(sqlite_url(staged)) as source:
            postgresql.check(target, name)
            existing = set(inspect(target).get_table_names())
            previous = _move_previous(target, existing, backup, name, replace_other)
            schema.create(target)
            copy_rows(source, target)
    return previous


def _move_previous(target: Connection, existing: set[str], backup: Backup, name: str, replace_other: bool) -> str:
    if schema.schema_version.name not in existing:
        schema.check_own_tables(existing, name)
        return ""
    schema.version_of(target, name)
    _check_identity(backup, _identity(target), name, replace_other)
    schema_name = f"polyfleet_replaced_{database_file_copy.stamp().replace('.', '_').lower()}"
    target.execute(text(f'CREATE SCHEMA "{schema_name}"'))
    for table in sorted(existing & set(schema.metadata.tables)):
        target.execute(text(f'ALTER TABLE "{table}" SET SCHEMA "{schema_name}"'))
    return f"schema {schema_name} of {name}"
