"""The tables. Data is JSON as text: the store never looks inside, so any database will do."""

import logging
import secrets
from collections.abc import Callable

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    inspect,
    select,
    text,
    update,
)

from cluster.errors import FleetError

long_work = logging.getLogger("orchestrator.store.upgrade")
"""Told what may take minutes as a store is opened: whoever waits for it can read that."""

VERSION = 3
"""The number of the newest file in migrations/versions. A store of a newer version is refused, never guessed at."""
REVISION = f"{VERSION:04d}"
LAST = "\U0010ffff"
"""Sorts behind every other character."""

metadata = MetaData()
_Sequence = BigInteger().with_variant(Integer, "sqlite")
_Exact = String(128).with_variant(String(128, collation="C"), "postgresql")
"""Compared byte by byte, so that a prefix is a range. Ids of jobs are in all tables, or PostgreSQL uses no index."""

schema_version = Table("schema_version", metadata, Column("version", Integer, primary_key=True))
"""One row, which every version of Polyfleet reads before it touches anything."""

alembic_version = Table("alembic_version", metadata, Column("version_num", String(32), primary_key=True))
"""One row: the last migration that ran, as Alembic writes it. Absent where no migration has run since version 1."""

writer = Table("writer", metadata, Column("id", Integer, primary_key=True), Column("token", String(64), nullable=False))
"""One row: who may write. A server puts its token there on opening the store; one that finds another's is replaced."""

identity = Table(
    "identity", metadata, Column("id", Integer, primary_key=True), Column("name", String(64), nullable=False)
)
"""One row: a random name, drawn once. A restored copy keeps it; an emptied or another database has another."""

events = Table(
    "events",
    metadata,
    Column("seq", _Sequence, primary_key=True, autoincrement=False),
    Column("time", Double, nullable=False),
    Column("job", _Exact, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("event", String(64), nullable=False),
    Column("data", Text, nullable=False),
    Index("events_of_job", "job", "seq"),
)

requests = Table(
    "requests",
    metadata,
    Column("key", String(255), primary_key=True),
    Column("digest", String(128), nullable=False),
    Column("status", Integer, nullable=False),
    Column("body", Text, nullable=False),
    Column("time", Double, nullable=False, server_default="0"),
    Index("requests_by_time", "time"),
)

reports = Table(
    "reports",
    metadata,
    Column("seq", _Sequence, primary_key=True, autoincrement=False),
    Column("job", _Exact, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("time", Double, nullable=False),
    Column("data", Text, nullable=False),
    Column("at", BigInteger, nullable=False, server_default="0"),
    Index("reports_of_job", "job", "seq"),
)

benchmark_lines = Table(
    "benchmark_lines",
    metadata,
    Column("seq", _Sequence, primary_key=True, autoincrement=True),
    Column("run", String(128), nullable=False),
    Column("time", Double, nullable=False),
    Column("line", String(64), nullable=False),
    Column("data", Text, nullable=False),
    Index("benchmark_lines_of_run", "run", "seq"),
)
"""The log of each benchmark run: what was asked for, every cell as it was measured, how it ended."""


jobs = Table(
    "jobs",
    metadata,
    Column("number", _Sequence, primary_key=True, autoincrement=False),
    Column("id", _Exact, nullable=False, unique=True),
    Column("name", _Exact, nullable=False),
    Column("task", String(64), nullable=False),
    Column("state", String(32), nullable=False),
    Column("open", Boolean, nullable=False),
    Column("submitted", Double, nullable=False),
    Column("ended", Double),
    Column("seq", BigInteger, nullable=False),
    Column("damaged", Text, nullable=False, server_default=""),
    Column("version", String(16), nullable=False),
    Column("digest", BigInteger, nullable=False),
    Column("data", Text, nullable=False),
    Index("jobs_by_state", "state", "number"),
    Index("jobs_by_name", "name", "state", "number"),
)
"""A cache of the log, written with it: one row per job. `number` is that of its `submitted` event, `seq` that of the
newest event that counted. `open` is a job that has not ended, or whose attempt still holds devices. `damaged` says why
its history cannot be trusted. `data` is the Record (see record_codec.py), `digest` its checksum."""

Index("jobs_open", jobs.c.open, jobs.c.number, sqlite_where=text("open = 1"), postgresql_where=jobs.c.open)
Index("jobs_ended", jobs.c.ended, sqlite_where=~jobs.c.open, postgresql_where=~jobs.c.open)

counters = Table(
    "counters",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
"""Numbers that never go back: the last event and report, of which the rows may have been removed, the generation."""

removals = Table(
    "removals",
    metadata,
    Column("job", _Exact, primary_key=True),
    Column("node", String(255), primary_key=True),
    Column("epoch", BigInteger, primary_key=True),
    Column("time", Double, nullable=False),
)
"""What is left to remove of a job that is in `jobs` no more: an attempt's folder on a node, or, where node is "", the
job's events and reports in this database."""


def prepare(connection: Connection, where: str, before_upgrade: Callable[[int], None]) -> None:
    """Make the tables, or bring those of an older version up to date; called in the transaction that does all of it.

    `before_upgrade` gets the version found before the first change. Raises FleetError for a store that a newer
    Polyfleet wrote and for tables of another program; nothing is touched then.
    """
    there = set(inspect(connection).get_table_names())
    if schema_version.name not in there:
        check_own_tables(there, where)
        create(connection)
    else:
        found = version_of(connection, where)
        if alembic_version.name not in there or connection.scalar(select(alembic_version.c.version_num)) != REVISION:
            from orchestrator.store import migrations  # Alembic is imported for an upgrade only

            long_work.info("bringing the tables of %s up to date; a large store takes minutes", where)
            before_upgrade(found)
            migrations.upgrade(connection)
            connection.execute(update(schema_version).values(version=VERSION))
    if connection.scalar(select(identity.c.name)) is None:
        connection.execute(identity.insert().values(id=1, name=secrets.token_hex(16)))


def create(connection: Connection) -> None:
    """All tables as of this version, without a row but for the version. Tests compare them to what migrations make."""
    metadata.create_all(connection)
    connection.execute(schema_version.insert().values(version=VERSION))
    connection.execute(alembic_version.insert().values(version_num=REVISION))


def version_of(connection: Connection, where: str) -> int:
    """Raises FleetError for a newer one than ours."""
    found = connection.scalar(select(schema_version.c.version)) or 0
    if found > VERSION:
        raise FleetError(
            f"{where} was written by a newer Polyfleet: its schema is version {found}, this one reads up to {VERSION}",
            "upgrade polyfleet, or set POLYFLEET_HOME to another folder",
        )
    return found


def check_own_tables(there: set[str], where: str) -> None:
    """Raises FleetError for tables of our names that no job store has made."""
    if taken := sorted(there & set(metadata.tables)):
        raise FleetError(
            f"{where} has tables of another program: {', '.join(taken)}", "name an empty database, or another schema"
        )
