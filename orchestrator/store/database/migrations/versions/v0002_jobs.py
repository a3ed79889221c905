"""Add `jobs`, one row per job, built from events when first needed; `removals` and `counters`; `reports.at`."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
EXACT = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("requests", sa.Column("time", sa.Double(), nullable=False, server_default="0"))
    # Existing keys count as used at the time of the upgrade.
    op.execute(sa.text("UPDATE requests SET time = :now").bindparams(now=time.time()))
    op.create_index("requests_by_time", "requests", ["time"])
    op.add_column("reports", sa.Column("at", sa.BigInteger(), nullable=False, server_default="0"))
    jobs = op.create_table(
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
    op.create_index("jobs_by_state", "jobs", ["state", "number"])
    op.create_index("jobs_by_name", "jobs", ["name", "state", "number"])
    is_open = jobs.c.open
    op.create_index("jobs_open", "jobs", ["open", "number"], sqlite_where=sa.text("open = 1"), postgresql_where=is_open)
    op.create_index("jobs_ended", "jobs", ["ended"], sqlite_where=~is_open, postgresql_where=~is_open)
    op.create_table(
        "counters",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "removals",
        sa.Column("job", EXACT, primary_key=True),
        sa.Column("node", sa.String(255), primary_key=True),
        sa.Column("epoch", sa.BigInteger(), primary_key=True),
        sa.Column("time", sa.Double(), nullable=False),
    )
