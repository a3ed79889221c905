"""A version of the tables after ours, made up: stores of this version are upgraded to it as to a later release."""

import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from orchestrator.store.database import migrations, schema

VERSION = schema.VERSION + 1
MIGRATION = f'''
import sqlalchemy as sa
from alembic import op

revision = "{schema.revision(VERSION)}"
down_revision = "{schema.revision(schema.VERSION)}"


def upgrade() -> None:
    op.add_column("events", sa.Column("note", sa.Text(), nullable=False, server_default=""))
    op.create_table("notes", sa.Column("id", sa.Integer(), primary_key=True))
    op.execute("DELETE FROM jobs")  # they are built again from the events
'''
OPEN = """
import sys
from pathlib import Path
from orchestrator.store.database import migrations, schema
from orchestrator.store.events.event_store import EventStore
migrations.HERE, schema.VERSION = Path(sys.argv[1]), schema.VERSION + 1
EventStore(sys.argv[2]).close()
print("alembic" in sys.modules)
"""


def write_migrations(folder):
    """All migrations of ours and the one after."""
    shutil.copytree(migrations.HERE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / f"{schema.revision(VERSION)}_next.py").write_text(MIGRATION)
    return folder


def use(monkeypatch, folder):
    """Make this process one of the next version."""
    monkeypatch.setattr(migrations, "HERE", folder)
    monkeypatch.setattr(schema, "VERSION", VERSION)


def open_command(folder, url):
    """A process of the next version that opens a store, and prints whether it imported Alembic."""
    return [sys.executable, "-c", OPEN, str(folder), url]


def copies(path: Path):
    return sorted(path.parent.glob("polyfleet-version-*.db"))


def events_in(path):
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return connection.execute("SELECT seq, time, job, epoch, event, data FROM events ORDER BY seq").fetchall()


def is_upgraded(path):
    """Whether a database is of the next version, in all its tables; else it is of ours in all of them."""
    with closing(sqlite3.connect(path)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        [(version,)] = connection.execute("SELECT version FROM schema_version").fetchall()
        [(revision,)] = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        columns = [row[1] for row in connection.execute("PRAGMA table_info(events)")]
    assert revision == schema.revision(version)
    assert ("notes" in tables) is ("note" in columns) is (version == VERSION)
    return version == VERSION
