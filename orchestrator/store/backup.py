"""A job store as one SQLite file, whatever database it is in, taken while a server writes or not."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, MetaData, create_engine, event, insert, inspect, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from cluster.errors import UserError
from orchestrator.store import database_file_copy, migrations, postgresql, schema, sqlite
from orchestrator.store.database import is_sqlite, name_of, parsed, translate_error

ROWS_AT_ONCE = 2000
MADE_BY = "a server makes it when it starts for the first time"
NOT_COPIED = {schema.alembic_version.name, schema.schema_version.name, schema.writer.name}


def backup(url: str, target: Path) -> int:
    """Write the store as it is at one moment to `target`; its size in bytes.

    Raises UserError when `target` is there or there is no store, FleetError when it is damaged or the disk is full.
    """
    found = parsed(url)
    if is_sqlite(found):
        database_file_copy.copy(sqlite.path_of(found), target)
    else:
        with database_file_copy.published(target) as part, snapshot(url) as source:
            try:
                _export(source, part, version_in(source, name_of(found)))
            except (DBAPIError, sqlite3.Error) as e:
                error = e.orig if isinstance(e, DBAPIError) else e
                if not isinstance(error, sqlite3.Error):
                    raise
                raise sqlite.translate_copy_error(error, target, target) from e
    return target.stat().st_size


def _export(source: Connection, part: Path, version: int) -> None:
    """The tables of that version in a file, with the rows of `source`."""
    with file_engine(part).begin() as made:
        migrations.upgrade(made, f"{version:04d}")
        made.execute(schema.schema_version.insert().values(version=version))
        copy_rows(source, made)
    database_file_copy.finish(part)


@contextmanager
def snapshot(url: str) -> Iterator[Connection]:
    """A connection that only reads, and sees the store at one moment, whatever is written meanwhile."""
    found = parsed(url)
    if is_sqlite(found):
        if not (path := sqlite.path_of(found)).is_file():
            raise UserError(f"there is no job store in {path}", MADE_BY)
        engine = create_engine("sqlite://", creator=lambda: sqlite.reader(path), poolclass=NullPool)
    else:
        _, readers = postgresql.engines(found)
        engine = readers.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    try:
        with engine.connect() as connection:
            if is_sqlite(found):
                connection.exec_driver_sql("BEGIN").close()
            yield connection
    except DBAPIError as e:
        raise translate_error(e, found) from e
    finally:
        engine.dispose()


def version_in(connection: Connection, where: str) -> int:
    """Of the tables there. Raises UserError where no job store is, FleetError for one of a newer version."""
    if not inspect(connection).has_table(schema.schema_version.name):
        raise UserError(f"there is no job store in {where}", MADE_BY)
    return schema.version_of(connection, where)


def file_engine(path: Path) -> Engine:
    """For a SQLite file that nobody else knows yet. Its transactions begin as we say: one sync, not one a row."""
    engine = create_engine("sqlite://", creator=lambda: sqlite.plain_connection(path), poolclass=NullPool)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN").close())
    return engine


def copy_rows(source: Connection, target: Connection) -> None:
    """Of all tables that both have; what is there of each is of the same version."""
    tables = MetaData()
    tables.reflect(target)
    there = set(inspect(source).get_table_names())
    for table in tables.sorted_tables:
        if table.name in there - NOT_COPIED:
            rows = source.execution_options(yield_per=ROWS_AT_ONCE).execute(select(table))
            for some in rows.mappings().partitions():
                target.execute(insert(table), [dict(row) for row in some])
