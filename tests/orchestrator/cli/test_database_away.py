"""A server whose database is restarted or locked by another program."""

import json
import os
import sqlite3
from contextlib import closing

import pytest
from jobs_of_a_home import jobs, put_job

# A server outlives whoever started it: that is its purpose, and what this warning is about.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")]


def test_a_server_goes_on_unaided_when_its_postgresql_is_restarted(home, polyfleet, postgresql, monkeypatch):
    url = postgresql.url()
    put_job(url, "one")
    monkeypatch.setenv("POLYFLEET_DATABASE_URL", url)
    assert jobs(polyfleet) == {"one": "PENDING"}
    pid = json.loads(polyfleet("server", "status", "-o", "json").stdout)["pid"]
    postgresql.restart()
    done = polyfleet("cancel", "one")
    assert done.returncode == 0, done.stderr
    assert jobs(polyfleet) == {"one": "CANCELLED"}
    assert json.loads(polyfleet("server", "status", "-o", "json").stdout)["pid"] == pid
    assert postgresql.sql(url, "SELECT count(*) FROM events WHERE event = 'cancelled'") == [(1,)]


def test_a_database_locked_by_another_program_is_told_within_seconds_and_does_not_stop_the_server(home, polyfleet):
    home.mkdir(0o700)
    put_job(f"sqlite:///{home / 'polyfleet.db'}", "one")
    assert jobs(polyfleet) == {"one": "PENDING"}
    with closing(sqlite3.connect(home / "polyfleet.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        refused = polyfleet("cancel", "one")
        assert refused.returncode == 3, refused.stderr
        assert jobs(polyfleet) == {"one": "PENDING"}
        other.execute("ROLLBACK")
    assert polyfleet("cancel", "one").returncode == 0
    assert jobs(polyfleet) == {"one": "CANCELLED"}
    assert os.environ["POLYFLEET_HOME"] == str(home)
