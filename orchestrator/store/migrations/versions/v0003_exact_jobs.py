"""Jobs of events and reports are compared byte by byte, as ids of jobs are: PostgreSQL used no index to look up one by
the other. SQLite compares so always.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for table in ("events", "reports"):
            op.alter_column(table, "job", type_=sa.String(128, collation="C"), existing_nullable=False)
