"""The tables. Data is JSON as text: the store never looks inside, so any database will do."""

import secrets
from collections.abc import Callable

from sqlalchemy import (
    BigInteger,
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
    update,
)

from cluster.errors import FleetError

VERSION = 1
"""The number of the newest file in migrations/versions. A store of a newer version is refused, never guessed at."""
REVISION = f"{VERSION:04d}"

metadata = MetaData()
_Sequence = BigInteger().with_variant(Integer, "sqlite")

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
    Column("job", String(128), nullable=False),
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
)

reports = Table(
    "reports",
    metadata,
    Column("seq", _Sequence, primary_key=True, autoincrement=False),
    Column("job", String(128), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("time", Double, nullable=False),
    Column("data", Text, nullable=False),
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


def prepare(connection: Connection, where: str, before_upgrade: Callable[[int], None]) -> None:
    """Make the tables, or bring those of an older version up to date; called in the transaction that does all of it.

    `before_upgrade` gets the version found before the first change. Raises FleetError for a store that a newer
    Polyfleet wrote and for tables of another program; nothing is touched then.
    """
    there = set(inspect(connection).get_table_names())
    if schema_version.name not in there:
        refuse_others(there, where)
        create(connection)
    else:
        found = version_of(connection, where)
        if alembic_version.name not in there or connection.scalar(select(alembic_version.c.version_num)) != REVISION:
            from orchestrator.store import migrations  # Alembic is imported for an upgrade only

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


def refuse_others(there: set[str], where: str) -> None:
    """Raises FleetError for tables of our names that no job store has made."""
    if taken := sorted(there & set(metadata.tables)):
        raise FleetError(
            f"{where} has tables of another program: {', '.join(taken)}", "name an empty database, or another schema"
        )
