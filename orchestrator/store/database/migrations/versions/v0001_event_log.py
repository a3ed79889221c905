"""Tables of version 1. Databases of that version have most or all of them, without a revision of Alembic."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    make("schema_version", sa.Column("version", sa.Integer(), primary_key=True))
    make("writer", sa.Column("id", sa.Integer(), primary_key=True), sa.Column("token", sa.String(64), nullable=False))
    make("identity", sa.Column("id", sa.Integer(), primary_key=True), sa.Column("name", sa.String(64), nullable=False))
    make(
        "events",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("job", sa.String(128), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("event", sa.String(64), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
    )
    make(
        "requests",
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("digest", sa.String(128), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
    )
    make(
        "reports",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=False),
        sa.Column("job", sa.String(128), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
    )
    make(
        "benchmark_lines",
        sa.Column("seq", SEQ, primary_key=True, autoincrement=True),
        sa.Column("run", sa.String(128), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("line", sa.String(64), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
    )
    op.create_index("events_of_job", "events", ["job", "seq"], if_not_exists=True)
    op.create_index("reports_of_job", "reports", ["job", "seq"], if_not_exists=True)
    op.create_index("benchmark_lines_of_run", "benchmark_lines", ["run", "seq"], if_not_exists=True)


def make(name: str, *columns: "sa.Column[int] | sa.Column[str] | sa.Column[float]") -> None:
    op.create_table(name, *columns, if_not_exists=True)
