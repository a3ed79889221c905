"""The database of a home: chosen by a setting, backed up, restored and looked through by real commands and servers."""

import json
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from jobs_of_a_home import jobs, put_job
from live_folders import list_files, read_text

# A server outlives whoever started it: that is its purpose, and what this warning is about.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")


def words_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def test_a_server_keeps_its_jobs_in_the_postgresql_that_is_named_once(home, polyfleet, postgresql, monkeypatch):
    """It is remembered, but its password is nowhere: not in the home, not in a command line, not in an answer."""
    url = postgresql.url()
    put_job(url, "there")
    monkeypatch.setenv("POLYFLEET_DATABASE_URL", url.replace("polyfleet@", "polyfleet:hunter2@"))
    assert jobs(polyfleet) == {"there": "PENDING"}
    assert not (home / "polyfleet.db").exists()
    status = json.loads(polyfleet("server", "status", "-o", "json").stdout)
    assert status["database"].startswith("postgresql://polyfleet@/")
    assert polyfleet("cancel", "there").returncode == 0
    assert postgresql.sql(url, "SELECT event FROM events WHERE job = 'there'")[-1] == ("cancelled",)
    shown = "".join(read_text(path) for path, status in list_files(home) if stat.S_ISREG(status.st_mode))
    assert "hunter2" not in shown + words_of(status["pid"]) + json.dumps(status)
    polyfleet("server", "stop")
    monkeypatch.delenv("POLYFLEET_DATABASE_URL")
    assert (home / "database-url").stat().st_mode & 0o777 == 0o600
    assert jobs(polyfleet) == {"there": "CANCELLED"}


def test_the_database_can_be_named_when_the_server_is_started(home, polyfleet, postgresql):
    url = postgresql.url()
    put_job(url, "there")
    refused = polyfleet("server", "start", "--database-url", url.replace("polyfleet@", "polyfleet:hunter2@"))
    assert refused.returncode == 2 and "a password on the command line can be read" in refused.stderr
    assert polyfleet("server", "start", "--database-url", url).returncode == 0
    assert jobs(polyfleet) == {"there": "PENDING"}
    assert polyfleet("server", "start", "--database-url", url).returncode == 0
    other = polyfleet("server", "start", "--database-url", f"sqlite:///{home / 'polyfleet.db'}")
    assert other.returncode == 2 and "the server is already running, with its jobs in postgresql://" in other.stderr


def test_a_file_of_the_setting_that_others_may_read_is_refused(home, here, polyfleet):
    home.mkdir(0o700)
    (home / "database-url").write_text("postgresql://me:hunter2@127.0.0.1:1/x\n")
    (home / "database-url").chmod(0o644)
    done = here("server", "verify")
    assert done.returncode == 2 and "(mode 0644)\n  run `chmod 600" in done.stderr
    (home / "database-url").chmod(0o600)
    done = polyfleet("server", "start")
    assert done.returncode == 3 and "hunter2" not in done.stderr
    assert "the job store postgresql://me@127.0.0.1:1/x failed: connection failed" in done.stderr


def test_a_second_server_on_a_database_ends_and_names_the_first(home_of, polyfleet, postgresql, monkeypatch):
    monkeypatch.setenv("POLYFLEET_DATABASE_URL", postgresql.url())
    home_of("first")
    assert polyfleet("server", "start").returncode == 0
    pid = json.loads(polyfleet("server", "status", "-o", "json").stdout)["pid"]
    home_of("second")
    refused = polyfleet("server", "start")
    assert refused.returncode == 3
    assert "another server has postgresql://" in refused.stderr and f"process {pid} since" in refused.stderr


def test_a_backup_is_taken_while_the_server_runs_and_restored_once_it_is_stopped(home, here, polyfleet, tmp_path):
    home.mkdir(0o700)
    put_job(f"sqlite:///{home / 'polyfleet.db'}", "one")
    assert jobs(polyfleet) == {"one": "PENDING"}
    saved = tmp_path / "saved.db"
    done = here("server", "backup", str(saved))
    assert done.returncode == 0 and done.stderr.startswith(f"wrote {saved} (")
    assert (home / "token").read_bytes().strip() not in saved.read_bytes()
    assert here("server", "backup", str(saved)).returncode == 2
    assert polyfleet("cancel", "one").returncode == 0
    refused = here("server", "restore", str(saved))
    assert refused.returncode == 3
    assert "another server has" in refused.stderr and "`polyfleet server stop`" in refused.stderr
    polyfleet("server", "stop")
    done = here("server", "restore", str(saved))
    assert done.returncode == 0 and "the previous job store is now" in done.stderr
    assert jobs(polyfleet) == {"one": "PENDING"}


def test_a_backup_without_a_name_lies_in_the_home_and_is_named_when_the_database_is_damaged(home, here, polyfleet):
    home.mkdir(0o700)
    path = home / "polyfleet.db"
    put_job(f"sqlite:///{path}", "one")
    assert here("server", "verify").returncode == 0
    assert here("server", "backup").returncode == 0
    [saved] = (home / "backups").iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xa5" * (len(content) - 4096))
    started = polyfleet("server", "start")
    assert started.returncode == 3
    assert "is damaged or not a job store" in started.stderr
    assert f"`polyfleet server restore FILE` (the newest one here is {saved})" in started.stderr
    looked = here("server", "verify")
    assert looked.returncode == 1
    assert "error: " in looked.stderr and f"the newest one here is {saved}" in looked.stderr
    assert here("server", "verify", str(saved)).returncode == 0
    assert here("server", "restore", str(saved)).returncode == 0
    assert here("server", "verify").returncode == 0


def test_findings_are_data_too_and_end_with_exit_code_1(home, here):
    home.mkdir(0o700)
    put_job(f"sqlite:///{home / 'polyfleet.db'}", "one")
    with closing(sqlite3.connect(home / "polyfleet.db")) as other, other:
        other.execute("UPDATE events SET data = 'rot'")
    done = here("server", "verify", "-o", "json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["rows"]["events"] == 1
    assert "row 1 of table events (submitted of one) has data that is not JSON" in told["findings"][0]


@pytest.mark.parametrize("verb", ["backup", "verify"])
def test_without_a_job_store_the_verbs_say_so(home, here, verb):
    done = here("server", verb)
    assert done.returncode == 2 and "there is no" in done.stderr
    assert not (home / "polyfleet.db").exists()
