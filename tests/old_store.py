"""Databases of 0.1.0, and what is known of a database whose process was killed as it brought one up to date."""

import sqlite3
import sys
from contextlib import closing

from orchestrator.store.database import schema

OPEN = [
    sys.executable,
    "-c",
    "import sys; from orchestrator.store.events.event_store import EventStore; EventStore(sys.argv[1]).close()",
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
