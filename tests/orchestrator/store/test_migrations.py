"""Older databases are upgraded: all at once or not at all, with a copy kept, and only when it is needed."""

import os
import re
import sqlite3
import subprocess
import sys
import zipfile
from contextlib import closing
from pathlib import Path

import next_version
import psycopg
import pytest
from filled_store import content, fill
from next_version import copies, events_in, is_upgraded
from sqlalchemy import create_engine, inspect

from cluster.errors import FleetError
from orchestrator.core.model import Event
from orchestrator.home.server_record import STARTUP_LOGGER
from orchestrator.store.database import database, migrations, schema
from orchestrator.store.database.backup import backup
from orchestrator.store.database.restore import restore
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.events.verify import verify

EVENT = Event("j", "started", 1, 1.0)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path):
    """The SQLite database of a store of this version, with five jobs."""
    path = tmp_path / "polyfleet.db"
    make_store(path)
    return path


@pytest.fixture
def newer(tmp_path):
    """The migrations of the version after ours."""
    return next_version.write_migrations(tmp_path / "migrations")


def make_store(path):
    with closing(EventStore(f"sqlite:///{path}")) as store:
        fill(store)


def shape(connection):
    """All that a database tells of its tables."""
    found = inspect(connection)
    return {
        table: (
            sorted((c["name"], repr(c["type"]), c["nullable"]) for c in found.get_columns(table)),
            found.get_pk_constraint(table)["constrained_columns"],
            sorted((i["name"], tuple(i["column_names"]), bool(i["unique"])) for i in found.get_indexes(table)),
            sorted(tuple(u["column_names"]) for u in found.get_unique_constraints(table)),
        )
        for table in found.get_table_names()
    }


def test_migrations_make_the_tables_that_a_new_database_has(url):
    engine = create_engine(database.parse_url(url))
    with engine.begin() as connection:
        migrations.upgrade(connection)
        migrated = shape(connection)
    engine.dispose()
    made = create_engine("sqlite://" if url.startswith("sqlite") else database.parse_url(url))
    with made.connect() as connection:
        if not url.startswith("sqlite"):
            connection.exec_driver_sql("CREATE SCHEMA fresh")
            connection.exec_driver_sql("SET search_path TO fresh")
        schema.create(connection)
        assert shape(connection) == migrated
        connection.rollback()
    made.dispose()


def test_there_is_one_file_for_each_version_and_the_newest_is_ours():
    files = sorted((Path(migrations.__file__).parent / "versions").glob("v*.py"))
    assert [file.name[:5] for file in files] == [schema.revision(n) for n in range(1, schema.VERSION + 1)]
    for file in files:
        assert re.search(r'^revision = "(\w+)"', file.read_text(), re.MULTILINE)[1] == file.name[:5]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_database_of_a_version_before_the_first_release_is_refused_and_left_as_it_is(path, open_at, version):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE schema_version SET version = ?", [version])
        connection.execute("UPDATE alembic_version SET version_num = ?", [f"{version:04d}"])
        if version == 1:
            connection.execute("DROP TABLE alembic_version")
        connection.commit()
    before = events_in(path)
    for refused in (open_at, verify, lambda url: restore(url, path)):
        with pytest.raises(FleetError, match=r"by a development version before Polyfleet 0\.1\.0") as error:
            refused(f"sqlite:///{path}")
        assert "POLYFLEET_HOME" in error.value.remedy
    assert events_in(path) == before and copies(path) == []


def test_a_database_of_a_newer_version_is_refused(path, newer, open_at, monkeypatch):
    with monkeypatch.context() as later:
        next_version.use(later, newer)
        open_at(f"sqlite:///{path}").close()
    with pytest.raises(FleetError, match="by a newer Polyfleet: its schema has version 2; this one reads up to 1"):
        open_at(f"sqlite:///{path}")
    assert is_upgraded(path)


def test_an_older_database_is_upgraded_and_kept_as_it_was(path, newer, open_at, monkeypatch, caplog):
    caplog.set_level("INFO")
    before = events_in(path)
    next_version.use(monkeypatch, newer)
    store = open_at(f"sqlite:///{path}")
    assert len(store.jobs.page((), "", None, 9).records) == 5
    assert store.append([EVENT]) == [11] and store.differences() == []
    store.close()
    assert is_upgraded(path) and events_in(path)[:10] == before
    [copy] = copies(path)
    assert str(copy) in caplog.text
    assert [r.getMessage() for r in caplog.records if r.name == STARTUP_LOGGER] == [
        f"upgrading the tables of {path}; this takes minutes for a large store"
    ]
    assert copy.stat().st_mode & 0o777 == 0o600
    assert not is_upgraded(copy) and events_in(copy) == before
    open_at(f"sqlite:///{path}").close()
    assert copies(path) == [copy]


def test_of_the_copies_the_newest_two_are_kept(path, newer, open_at, monkeypatch):
    made = []
    for _ in range(4):
        with monkeypatch.context() as later:
            next_version.use(later, newer)
            open_at(f"sqlite:///{path}").close()
        made += [copy for copy in copies(path) if copy not in made]
        for file in path.parent.glob("polyfleet.db*"):
            file.unlink()
        make_store(path)
    assert len(made) == 4 and copies(path) == made[2:]


def test_a_backup_of_an_older_version_is_restored_as_the_database_itself_is_upgraded(
    url, newer, open_at, tmp_path, monkeypatch
):
    store = open_at(url)
    fill(store)
    before = content(store)
    store.close()
    backup(url, tmp_path / "old.db")
    next_version.use(monkeypatch, newer)
    for is_restored in (False, True):
        if is_restored:
            restore(url, tmp_path / "old.db")
        store = open_at(url)
        assert content(store) == before and len(store.jobs.page((), "", None, 9).records) == 5
        assert store.append([EVENT]) == [11] and store.differences() == []
        store.close()


def test_a_postgresql_whose_server_is_killed_in_the_middle_is_as_it_was(
    postgresql_url, postgresql, newer, wait_for, open_at
):
    store = open_at(postgresql_url)
    fill(store)
    before = content(store)
    store.close()
    name, _, folder = postgresql_url.partition("@/")[2].partition("?host=")
    server = "SELECT wait_event_type FROM pg_stat_activity WHERE application_name LIKE 'polyfleet %'"
    server += " AND datname = current_database()"  # its writer, and the session that has the lock
    with psycopg.connect(dbname=name, host=folder, user=postgresql.user) as other:
        other.execute("LOCK TABLE schema_version IN SHARE MODE")  # the last thing that an upgrade changes
        child = subprocess.Popen(next_version.open_command(newer, postgresql_url), cwd=ROOT)
        wait_for(lambda: ("Lock",) in postgresql.sql(postgresql_url, server))
        child.kill()
        child.wait()
    wait_for(lambda: not postgresql.sql(postgresql_url, server))
    tables = {table for (table,) in postgresql.sql(postgresql_url, "SELECT tablename FROM pg_tables")}
    assert "jobs" in tables and "notes" not in tables
    assert content(open_at(postgresql_url)) == before


def test_alembic_is_imported_for_an_upgrade_only(path, newer, tmp_path):
    for file, imported in ((tmp_path / "new.db", "False"), (path, "True"), (path, "False")):
        command = next_version.open_command(newer, f"sqlite:///{file}")
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert ran.stdout.strip() == imported, ran.stderr


def test_a_wheel_has_the_migrations(tmp_path):
    build = "import sys; from setuptools import build_meta as b; print(b.build_wheel(sys.argv[1]))"
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files", "-z", "orchestrator/store", "pyproject.toml", "README.md", "LICENSE"],
                             cwd=ROOT, capture_output=True, text=True, check=True).stdout  # fmt: skip
    for name in filter(None, tracked.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(ROOT / name, source / name)
    (tmp_path / "out").mkdir()
    subprocess.run([sys.executable, "-c", build, str(tmp_path / "out")], cwd=source, check=True, capture_output=True)
    [wheel] = (tmp_path / "out").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "orchestrator/store/database/migrations/env.py" in names
    assert "orchestrator/store/database/migrations/versions/v0001_first_release.py" in names
