"""Older databases are brought up to date: all at once or not at all, with a copy kept, and only when it is needed."""

import os
import re
import sqlite3
import subprocess
import sys
import zipfile
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, inspect

from orchestrator.core.model import Event
from orchestrator.server.record import LONG_WORK
from orchestrator.store import database, migrations, schema
from orchestrator.store.backup import backup
from orchestrator.store.events import EventStore
from orchestrator.store.once import Answer
from orchestrator.store.restore import restore

EVENT = Event("j", "started", 1, 1.0)
ROOT = Path(__file__).parents[3]
OPEN = [
    sys.executable,
    "-c",
    "import sys; from orchestrator.store.events import EventStore; EventStore(sys.argv[1]).close()",
]

FIRST = """
CREATE TABLE schema_version (version INTEGER NOT NULL, PRIMARY KEY (version));
CREATE TABLE writer (id INTEGER NOT NULL, token VARCHAR(64) NOT NULL, PRIMARY KEY (id));
CREATE TABLE events (seq INTEGER NOT NULL, time DOUBLE PRECISION NOT NULL, job VARCHAR(128) NOT NULL,
 epoch BIGINT NOT NULL, event VARCHAR(64) NOT NULL, data TEXT NOT NULL, PRIMARY KEY (seq));
CREATE INDEX events_of_job ON events (job, seq);
CREATE TABLE requests ("key" VARCHAR(255) NOT NULL, digest VARCHAR(128) NOT NULL, status INTEGER NOT NULL,
 body TEXT NOT NULL, PRIMARY KEY ("key"));
CREATE TABLE reports (seq INTEGER NOT NULL, job VARCHAR(128) NOT NULL, epoch BIGINT NOT NULL, step BIGINT NOT NULL,
 time DOUBLE PRECISION NOT NULL, data TEXT NOT NULL, PRIMARY KEY (seq));
CREATE INDEX reports_of_job ON reports (job, seq);
INSERT INTO schema_version VALUES (1);
INSERT INTO events VALUES (1, 1.0, 'old', 0, 'submitted', '{SUBMITTED}'), (2, 2.0, 'old', 1, 'placed', '{PLACED}');
INSERT INTO requests VALUES ('key', 'digest', 201, '{"id":"old"}');
"""
SUBMITTED = (
    '{"job":{"id":"old","name":"old","task":"run","candidates":[{"kinds":["cpu"],"count":1,"min_count":1,"nodes":1,'
    '"pool":"","node":"","memory_bytes":0,"precision":"","batch_size":0,"environment":{},"command":[],"arguments":{}}],'
    '"ordered":false,"priority":0,"objective":"any","workload":"","submitted_s":0.0,"recovery":{"max_restarts":0,'
    '"max_interruptions":-1,"retry_exit_codes":[],"backoff_s":1.0,"lease_s":20.0,"grace_s":30.0},"state":"PENDING",'
    '"epoch":0,"not_before_s":0.0,"restarts":0,"interruptions":0,"refusals":0,"first_candidate":0},'
    '"spec":{"command":"true"},"package":""}'
)
PLACED = '{"candidate":0,"kind":"cpu","pool":"cpu","leases":[["cpu-0/cpu",[0]]],"reason":"fits"}'
FIRST = FIRST.replace("{SUBMITTED}", SUBMITTED).replace("{PLACED}", PLACED)
"""A database of 0.1.0, before it had benchmark runs or an identity: Alembic has no note in it."""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "polyfleet.db"
    make_old(path)
    return path


def make_old(path):
    with closing(sqlite3.connect(path)) as old:
        old.executescript(f"PRAGMA journal_mode=WAL; BEGIN; {FIRST} COMMIT;")


def copies(path):
    return sorted(path.parent.glob("polyfleet-version-*.db"))


def rows(path):
    with closing(sqlite3.connect(path)) as found:
        assert found.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return [
            found.execute(f"SELECT * FROM {table}").fetchall() for table in ("events", "requests", "schema_version")
        ]


def is_current(path):
    with closing(sqlite3.connect(path)) as found:
        tables = {name for (name,) in found.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "alembic_version" not in tables:
            assert "benchmark_lines" not in tables and "identity" not in tables
            return False
        assert set(schema.metadata.tables) <= tables
        assert found.execute("SELECT version_num FROM alembic_version").fetchall() == [(schema.REVISION,)]
        assert found.execute("SELECT version FROM schema_version").fetchall() == [(schema.VERSION,)]
        return True


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
    engine = create_engine(database.parsed(url))
    with engine.begin() as connection:
        migrations.upgrade(connection)
        migrated = shape(connection)
    engine.dispose()
    made = create_engine("sqlite://" if url.startswith("sqlite") else database.parsed(url))
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
    assert store.once("key", "digest", lambda: Answer({"id": "new"})) == {"id": "old"}
    assert store.append([EVENT]) == [3] and len(store.identity) == 32 and store.differences() == []
    store.close()
    assert is_current(path)
    [copy] = copies(path)
    assert str(copy) in caplog.text
    assert [r.getMessage() for r in caplog.records if r.name == LONG_WORK] == [
        f"bringing the tables of {path} up to date; a large store takes minutes"
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
    assert store.once("key", "digest", lambda: Answer({"id": "new"})) == {"id": "old"}
    assert store.append([EVENT]) == [3] and len(store.identity) == 32 and store.differences() == []
    store.benchmarks.append("run", {"line": "begun"})
    assert postgresql.sql(postgresql_url, "SELECT version_num FROM alembic_version") == [(schema.REVISION,)]


@pytest.mark.parametrize("version", range(1, schema.VERSION))
def test_a_backup_of_each_older_version_is_restored_as_the_database_itself_is_upgraded(url, version, open_at, tmp_path):
    engine = create_engine(database.parsed(url))
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


LONG = [pytest.param(call, marks=pytest.mark.chaos) for call in ("pwrite64", "fdatasync", "unlink")]


@pytest.mark.parametrize("call", ["fsync", "link", *LONG])
def test_kill_9_at_any_step_leaves_the_old_database_or_the_new_one(tmp_path, kill_at, call):
    """The process is killed as it makes its first, second, third … call of a kind, until it makes no more of them."""
    before = after = 0
    for number in (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 25, 30, 40, 50, 70, 100, 150, 220, 320, 500):
        path = tmp_path / str(number) / "polyfleet.db"
        path.parent.mkdir()
        make_old(path)
        killed = kill_at(call, number, [*OPEN, f"sqlite:///{path}"])
        old = rows(path)
        assert old[0] == [(1, 1.0, "old", 0, "submitted", SUBMITTED), (2, 2.0, "old", 1, "placed", PLACED)]
        before, after = before + (not is_current(path)), after + is_current(path)
        assert all(rows(copy)[0] == old[0] for copy in copies(path))
        store = EventStore(f"sqlite:///{path}")
        assert store.append([EVENT]) == [3]
        store.close()
        assert is_current(path) and copies(path) and not list(path.parent.glob(".*.part"))
        if not killed:
            break
    assert not killed and after
    assert before or call in ("link", "unlink")


def test_alembic_is_imported_for_an_upgrade_only(path, tmp_path):
    code = "import sys; from orchestrator.store.events import EventStore; EventStore(sys.argv[1]).close();"
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
    assert "orchestrator/store/migrations/env.py" in names
    assert "orchestrator/store/migrations/versions/v0001_event_log.py" in names
