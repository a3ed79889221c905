"""Tables of the job store. Data columns are JSON as text, which queries never inspect, so that any database works."""

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

startup_log = logging.getLogger("orchestrator.store.upgrade")
"""Logger of steps that may take minutes while a store is opened; the client that waits for the server shows them."""

VERSION = 1
"""Number of the newest file in migrations/versions. A store of a newer version is refused."""
LAST_CHARACTER = "\U0010ffff"
"""Sorts after every other character."""

metadata = MetaData()
_Sequence = BigInteger().with_variant(Integer, "sqlite")
_Exact = String(128).with_variant(String(128, collation="C"), "postgresql")
"""Compared byte by byte, so that a prefix is a range. All tables need this type for job ids: with different collations
PostgreSQL would use no index."""

schema_version = Table("schema_version", metadata, Column("version", Integer, primary_key=True))
"""One row, which every version of Polyfleet reads before it changes anything."""

alembic_version = Table("alembic_version", metadata, Column("version_num", String(32), primary_key=True))
"""One row: the last migration that ran, as Alembic writes it."""

writer = Table("writer", metadata, Column("id", Integer, primary_key=True), Column("token", String(64), nullable=False))
"""One row: token of the server that may write, set when it opens the store. A server that finds another token stops
writing."""

identity = Table(
    "identity", metadata, Column("id", Integer, primary_key=True), Column("name", String(64), nullable=False)
)
"""One row: a random name of the store. A restored copy keeps it; an emptied or another database has another one."""

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
"""Log of each benchmark run: the request, each result as it is measured, and how the run ended."""


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
"""One row per job: its state according to the log of events, written in the same transaction. `number` is that of its
`submitted` event, `seq` that of the newest valid event. `open`: the job has not ended, or its attempt still has
devices. `damaged`: why its history cannot be trusted. `data`: the Record (see record_codec.py), `digest`: its checksum.
"""

Index("jobs_open", jobs.c.open, jobs.c.number, sqlite_where=text("open = 1"), postgresql_where=jobs.c.open)
Index("jobs_ended", jobs.c.ended, sqlite_where=~jobs.c.open, postgresql_where=~jobs.c.open)

counters = Table(
    "counters",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
"""Numbers that never decrease: the last event and report, whose rows may have been removed, and the generation."""

removals = Table(
    "removals",
    metadata,
    Column("job", _Exact, primary_key=True),
    Column("node", String(255), primary_key=True),
    Column("epoch", BigInteger, primary_key=True),
    Column("time", Double, nullable=False),
)
"""Data that remains to be removed of a job that is no longer in `jobs`: an attempt's folder on a node, or, if node is
"", the job's events and reports in this database."""


def prepare(connection: Connection, where: str, before_upgrade: Callable[[int], None]) -> None:
    """Create the tables, or upgrade those of an older version, in the caller's transaction.

    `before_upgrade` is called with the old version before the first change. Raises FleetError, without a change, for
    the tables of a newer Polyfleet, of one before 0.1.0 and of another program.
    """
    existing = set(inspect(connection).get_table_names())
    if schema_version.name not in existing:
        check_own_tables(existing, where)
        create(connection)
    else:
        old_version = version_of(connection, where)
        if old_version < VERSION:
            from orchestrator.store.database import migrations  # Alembic is imported for an upgrade only

            startup_log.info("upgrading the tables of %s; this takes minutes for a large store", where)
            before_upgrade(old_version)
            migrations.upgrade(connection)
            connection.execute(update(schema_version).values(version=VERSION))
    if connection.scalar(select(identity.c.name)) is None:
        connection.execute(identity.insert().values(id=1, name=secrets.token_hex(16)))


def create(connection: Connection) -> None:
    """Create all tables of this version; only the version has rows. Tests compare them with migrated tables."""
    metadata.create_all(connection)
    connection.execute(schema_version.insert().values(version=VERSION))
    connection.execute(alembic_version.insert().values(version_num=revision(VERSION)))


def revision(version: int) -> str:
    """Name of a version in Alembic. Versions before the first release counted without the `v`."""
    return f"v{version:04d}"


def version_of(connection: Connection, where: str) -> int:
    """Version of a store's tables. Raises FleetError if it is newer than VERSION, or from before the first release."""
    version = connection.scalar(select(schema_version.c.version)) or 0
    has_revision = inspect(connection).has_table(alembic_version.name)
    if not has_revision or not str(connection.scalar(select(alembic_version.c.version_num))).startswith("v"):
        raise FleetError(
            f"{where} was written by a development version before Polyfleet 0.1.0, whose tables are not supported",
            "set POLYFLEET_HOME to another folder, or POLYFLEET_DATABASE_URL to an empty database",
        )
    if version > VERSION:
        raise FleetError(
            f"{where} was written by a newer Polyfleet: its schema has version {version}; this one reads up to"
            f" {VERSION}",
            "upgrade polyfleet, or set POLYFLEET_HOME to another folder",
        )
    return version


def check_own_tables(existing: set[str], where: str) -> None:
    """Raise FleetError if there are tables with our names that do not belong to a job store."""
    if conflicting := sorted(existing & set(metadata.tables)):
        raise FleetError(
            f"{where} has tables of another program: {', '.join(conflicting)}",
            "name an empty database, or another schema",
        )
