"""Back up a job store of any database to one SQLite file, while a server writes or not."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, MetaData, create_engine, event, insert, inspect, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from cluster.errors import UserError
from orchestrator.store.database import database_file_copy, migrations, postgresql, schema, sqlite
from orchestrator.store.database.database import is_sqlite, name_of, parse_url, translate_error

ROWS_AT_ONCE = 2000
START_REMEDY = "start a server with `polyfleet server start`: it creates the job store"
NOT_COPIED = {schema.alembic_version.name, schema.schema_version.name, schema.writer.name}


def backup(url: str, target: Path) -> int:
    """Write a consistent snapshot of the store to `target`; return its size in bytes.

    Raises UserError if `target` exists or there is no store, FleetError if the store is damaged or the disk is full.
    """
    database_url = parse_url(url)
    if is_sqlite(database_url):
        database_file_copy.copy(sqlite.file_of(database_url), target)
    else:
        with database_file_copy.new_file(target) as part, snapshot(url) as source:
            try:
                _export(source, part, version_in(source, name_of(database_url)))
            except (DBAPIError, sqlite3.Error) as e:
                error = e.orig if isinstance(e, DBAPIError) else e
                if not isinstance(error, sqlite3.Error):
                    raise
                raise sqlite.translate_copy_error(error, target, target) from e
    return target.stat().st_size


def _export(source: Connection, part: Path, version: int) -> None:
    """Write the rows of `source` to the file `part`, in tables of that version."""
    with file_engine(part).begin() as target:
        migrations.upgrade(target, schema.revision(version))
        target.execute(schema.schema_version.insert().values(version=version))
        copy_rows(source, target)
    database_file_copy.make_single_file(part)


@contextmanager
def snapshot(url: str) -> Iterator[Connection]:
    """Yield a read-only connection that sees a snapshot of the store, regardless of later writes."""
    database_url = parse_url(url)
    if is_sqlite(database_url):
        if not (path := sqlite.file_of(database_url)).is_file():
            raise UserError(f"there is no job store in {path}", START_REMEDY)
        engine = create_engine("sqlite://", creator=lambda: sqlite.reader(path), poolclass=NullPool)
    else:
        _, readers = postgresql.engines(database_url)
        engine = readers.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    try:
        with engine.connect() as connection:
            if is_sqlite(database_url):
                connection.exec_driver_sql("BEGIN").close()
            yield connection
    except DBAPIError as e:
        raise translate_error(e, database_url) from e
    finally:
        engine.dispose()


def version_in(connection: Connection, where: str) -> int:
    """Version of the store's tables. Raises UserError if there is no job store, FleetError for a newer version."""
    if not inspect(connection).has_table(schema.schema_version.name):
        raise UserError(f"there is no job store in {where}", START_REMEDY)
    return schema.version_of(connection, where)


def file_engine(path: Path) -> Engine:
    """Engine for a SQLite file that no other process uses yet. Explicit transactions avoid a sync for every row."""
    engine = create_engine("sqlite://", creator=lambda: sqlite.plain_connection(path), poolclass=NullPool)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN").close())
    return engine


def copy_rows(source: Connection, target: Connection) -> None:
    """Copy the rows of all tables that both stores have. Their tables must be of the same version."""
    tables = MetaData()
    tables.reflect(target)
    source_tables = set(inspect(source).get_table_names())
    for table in tables.sorted_tables:
        if table.name in source_tables - NOT_COPIED:
            rows = source.execution_options(yield_per=ROWS_AT_ONCE).execute(select(table))
            for batch in rows.mappings().partitions():
                target.execute(insert(table), [dict(row) for row in batch])
