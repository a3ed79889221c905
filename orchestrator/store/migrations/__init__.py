"""Changes of the tables, one file each in versions/, carried out by Alembic when an older database is opened.

A new one: change schema.py and raise its VERSION; write versions/vNNNN_what.py with `revision = "NNNN"`, the one before
as `down_revision`, and `upgrade()`, which uses `alembic.op` and tables as they are at that version, never schema.py.
"""

from pathlib import Path

from sqlalchemy import Connection

HERE = Path(__file__).parent


def upgrade(connection: Connection, to: str = "head") -> None:
    """Run what has not run yet, in the transaction that `connection` is in."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(HERE).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, to)
