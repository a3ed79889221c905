"""The tables. Data is JSON as text: the store never looks inside, so any database will do."""

import secrets

from sqlalchemy import BigInteger, Column, Connection, Double, Index, Integer, MetaData, String, Table, Text, select

from cluster.errors import FleetError

VERSION = 1
"""Raised when a table changes its meaning. A store of a newer version is refused, never guessed at."""

metadata = MetaData()
_Sequence = BigInteger().with_variant(Integer, "sqlite")

schema_version = Table("schema_version", metadata, Column("version", Integer, primary_key=True))

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


def prepare(connection: Connection, where: str) -> None:
    """Make what is missing. Raises FleetError for a store that a newer Polyfleet wrote; nothing is touched then."""
    schema_version.create(connection, checkfirst=True)
    found = connection.execute(select(schema_version.c.version)).scalar()
    if found is not None and found > VERSION:
        raise FleetError(
            f"{where} was written by a newer Polyfleet: its schema is version {found}, this one reads up to {VERSION}",
            "upgrade polyfleet, or set POLYFLEET_HOME to another folder",
        )
    metadata.create_all(connection)
    if found is None:
        connection.execute(schema_version.insert().values(version=VERSION))
    if connection.execute(select(identity.c.name)).scalar() is None:
        connection.execute(identity.insert().values(id=1, name=secrets.token_hex(16)))
