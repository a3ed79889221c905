"""Older databases are brought up to date: all at once or not at all, with a copy kept, and only when it is needed."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import psycopg
import pytest
from old_store import FIRST, OPEN, copies, is_current, make_old, rows
from sqlalchemy import create_engine, inspect

from orchestrator.core.model import Event
from orchestrator.home.server_record import STARTUP_LOGGER
from orchestrator.store.database import database, migrations, schema
from orchestrator.store.database.backup import backup
from orchestrator.store.database.restore import restore
from orchestrator.store.events.idempotency import StoredResponse

EVENT = Event("j", "started", 1, 1.0)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "polyfleet.db"
    make_old(path)
    return path


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
    assert [int(file.name[1:5]) for file in files] == list(range(1, schema.VERSION + 1))
    for number, file in enumerate(files, 1):
        assert re.search(r'^revision = "(\d+)"', file.read_text(), re.MULTILINE)[1] == f"{number:04d}"


def test_an_older_database_is_brought_up_to_date_and_kept_as_it_was(path, open_at, caplog):
    caplog.set_level("INFO")
    store = open_at(f"sqlite:///{path}")
    assert [(e.job, e.event) for e in store.read(0)] == [("old", "submitted"), ("old", "placed")]
    assert [(r.job.id, str(r.job.state)) for r in store.jobs.open()] == [("old", "STARTING")]
    assert store.idempotent("key", "digest", lambda: StoredResponse({"id": "new"})) == {"id": "old"}
    assert store.append([EVENT]) == [3] and len(store.identity) == 32 and store.differences() == []
    store.close()
    assert is_current(path)
    [copy] = copies(path)
    assert str(copy) in caplog.text
    assert [r.getMessage() for r in caplog.records if r.name == STARTUP_LOGGER] == [
        f"upgrading the tables of {path}; this takes minutes for a large store"
    ]
    assert copy.stat().st_mode & 0o777 == 0o600
    assert not is_current(copy) and rows(copy)[0] == rows(path)[0][:2]
    open_at(f"sqlite:///{path}").close()
    assert copies(path) == [copy]


def test_of_the_copies_the_newest_two_are_kept(path, open_at):
    made = []
    for _ in range(4):
        open_at(f"sqlite:///{path}").close()
        made += [copy for copy in copies(path) if copy not in made]
        for file in path.parent.glob("polyfleet.db*"):
            file.unlink()
        make_old(path)
    assert len(made) == 4 and copies(path) == made[2:]


def test_an_older_postgresql_is_brought_up_to_date(postgresql_url, postgresql, open_at):
    postgresql.sql(postgresql_url, *filter(str.strip, FIRST.split(";\n")))
    store = open_at(postgresql_url)
    assert [(e.job, e.event) for e in store.read(0)] == [("old", "submitted"), ("old", "placed")]
    assert [(r.job.id, str(r.job.state)) for r in store.jobs.open()] == [("old", "STARTING")]
    assert store.idempotent("key", "digest", lambda: StoredResponse({"id": "new"})) == {"id": "old"}
    assert store.append([EVENT]) == [3] and len(store.identity) == 32 and store.differences() == []
    store.benchmarks.append("run", {"line": "started"})
    assert postgresql.sql(postgresql_url, "SELECT version_num FROM alembic_version") == [(schema.REVISION,)]


@pytest.mark.parametrize("version", range(1, schema.VERSION))
def test_a_backup_of_each_older_version_is_restored_as_the_database_itself_is_upgraded(url, version, open_at, tmp_path):
    engine = create_engine(database.parse_url(url))
    with engine.begin() as connection:
        migrations.upgrade(connection, f"{version:04d}")
        connection.exec_driver_sql(f"INSERT INTO schema_version VALUES ({version})")
        connection.exec_driver_sql(next(statement for statement in FIRST.split(";\n") if "INTO events" in statement))
    engine.dispose()
    backup(url, tmp_path / "old.db")
    for is_restored in (False, True):
        if is_restored:
            restore(url, tmp_path / "old.db", replace_other=True)
        store = open_at(url)
        assert [(e.job, e.event) for e in store.read(0)] == [("old", "submitted"), ("old", "placed")]
        assert [(r.job.id, str(r.job.state)) for r in store.jobs.page((), "", None, 9).records] == [("old", "STARTING")]
        assert store.append([EVENT]) == [3] and store.differences() == []
        store.close()


def test_a_postgresql_whose_server_is_killed_in_the_middle_is_as_it_was(postgresql_url, postgresql, wait_for, open_at):
    postgresql.sql(postgresql_url, *filter(str.strip, FIRST.split(";\n")))
    name, _, folder = postgresql_url.partition("@/")[2].partition("?host=")
    server = "SELECT wait_event_type FROM pg_stat_activity WHERE application_name = 'polyfleet store'"
    server += " AND datname = current_database()"
    with psycopg.connect(dbname=name, host=folder, user=postgresql.user) as other:
        other.execute("LOCK TABLE schema_version IN SHARE MODE")  # the last thing that an upgrade changes
        child = subprocess.Popen([*OPEN, postgresql_url], cwd=ROOT)
        wait_for(lambda: ("Lock",) in postgresql.sql(postgresql_url, server))
        child.kill()
        child.wait()
    wait_for(lambda: not postgresql.sql(postgresql_url, server))
    tables = {table for (table,) in postgresql.sql(postgresql_url, "SELECT tablename FROM pg_tables")}
    assert not tables & {"alembic_version", "benchmark_lines", "identity", "jobs"}
    assert len(open_at(postgresql_url).read(0)) == 2


def test_alembic_is_imported_for_an_upgrade_only(path, tmp_path):
    code = "import sys; from orchestrator.store.events.event_store import EventStore; EventStore(sys.argv[1]).close();"
    code += "print('alembic' in sys.modules)"
    for url, imported in ((tmp_path / "new.db", "False"), (path, "True"), (path, "False")):
        ran = subprocess.run([sys.executable, "-c", code, f"sqlite:///{url}"], cwd=ROOT, capture_output=True, text=True)
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
    assert "orchestrator/store/database/migrations/versions/v0001_event_log.py" in names
