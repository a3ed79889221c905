"""Compare job ids in `events` and `reports` byte by byte, as in `jobs`: with different collations PostgreSQL used no
index for joins. SQLite always compares bytes.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for table in ("events", "reports"):
            op.alter_column(table, "job", type_=sa.String(128, collation="C"), existing_nullable=False)
