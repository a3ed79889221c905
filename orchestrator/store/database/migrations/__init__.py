"""Schema migrations, one file each in versions/, which Alembic runs when an older database is opened.

To add one, change schema.py and increase its VERSION; write versions/vNNNN_what.py with `revision = "vNNNN"`, the
previous one as `down_revision`, and `upgrade()`, which uses `alembic.op` and the tables of that version, never
schema.py.
"""

from pathlib import Path

from sqlalchemy import Connection

HERE = Path(__file__).parent


def upgrade(connection: Connection, to: str = "head") -> None:
    """Run pending migrations in the transaction of `connection`."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(HERE).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, to)
