"""Tables of the first release."""

import sqlalchemy as sa
from alembic import op

revision = "v0001"
down_revision = None

SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
EXACT = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")


def upgrade() -> None:
    create_marks()
    create_log()
    jobs = create_jobs()
    op.create_index("requests_by_time", "requests", ["time"])
    op.create_index("events_of_job", "events", ["job", "seq"])
    op.create_index("reports_of_job", "reports", ["job", "seq"])
    op.create_index("benchmark_lines_of_run", "benchmark_lines", ["run", "seq"])
    op.create_index("jobs_by_state", "jobs", ["state", "number"])
    op.create_index("jobs_by_name", "jobs", ["name", "state", "number"])
    is_open = jobs.c.open
    op.create_index("jobs_open", "jobs", ["open", "number"], sqlite_where=sa.text("open = 1"), postgresql_where=is_open)
    op.create_index("jobs_ended", "jobs", ["ended"], sqlite_where=~is_open, postgresql_where=~is_open)


def create_marks() -> None:
    """Tables of one row or of counters, about the store itself."""
    op.create_table("schema_version", sa.Column("version", sa.Integer(), primary_key=True))
    op.create_table(
        "writer", sa.Column("id", sa.Integer(), primary_key=True), sa.Column("token", sa.String(64), nullable=False)
    )
    op.create_table(
        "identity", sa.Column("id", sa.Integer(), primary_key=True), sa.Column("name", sa.String(64), nullable=False)
    )
    op.create_table(
        "counters",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.BigInteger(), nullable=False),
    )


def create_log() -> None:
    op.create_table(
        "events",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("job", EXACT, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("event", sa.String(64), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
    )
    op.create_table(
        "requests",
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("digest", sa.String(128), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False, server_default="0"),
    )
    op.create_table(
        "reports",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=False),
        sa.Column("job", EXACT, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False, server_default="0"),
    )
    op.create_table(
        "benchmark_lines",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
        sa.Column("run", sa.String(128), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("line", sa.String(64), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
    )
    op.create_table(
        "removals",
        sa.Column("job", EXACT, primary_key=True),
        sa.Column("node", sa.String(255), primary_key=True),
        sa.Column("epoch", sa.BigInteger(), primary_key=True),
        sa.Column("time", sa.Double(), nullable=False),
    )


def create_jobs() -> sa.Table:
    return op.create_table(
        "jobs",
        sa.Column("number", SEQ, primary_key=True, autoincrement=False),
        sa.Column("id", EXACT, nullable=False, unique=True),
        sa.Column("name", EXACT, nullable=False),
        sa.Column("task", sa.String(64), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("open", sa.Boolean(), nullable=False),
        sa.Column("submitted", sa.Double(), nullable=False),
        sa.Column("ended", sa.Double()),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("damaged", sa.Text(), nullable=False, server_default=""),
        sa.Column("version", sa.String(16), nullable=False),
        sa.Column("digest", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
    )
