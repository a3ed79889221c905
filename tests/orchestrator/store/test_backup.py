"""Backups taken while a server writes, put back, and looked through: on both databases, with real processes killed."""

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from filled_store import BACKUP, RESTORE, content, fill, submit
from patience import LIMIT_S

from cluster.errors import Conflict, FleetError, UserError
from orchestrator.core.model import Event
from orchestrator.store.database import schema
from orchestrator.store.database.backup import backup
from orchestrator.store.database.database import sqlite_url
from orchestrator.store.database.restore import restore
from orchestrator.store.events import verify as verifying
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.events.verify import verify

ROOT = Path(__file__).parents[3]
EVENT = Event("j", "started", 1, 1.0)


@pytest.fixture
def saved(open_at, url, tmp_path):
    """The backup of a store with five jobs, which has two more now and is closed."""
    return saved_of(url, open_at, tmp_path)


@pytest.fixture
def saved_file(open_at, tmp_path):
    """As `saved`, of another SQLite database."""
    return saved_of(f"sqlite:///{tmp_path / 'first.db'}", open_at, tmp_path)


def saved_of(url, open_at, tmp_path):
    store = open_at(url)
    fill(store)
    backup(url, tmp_path / "saved.db")
    fill(store, 5, 2)
    store.close()
    return tmp_path / "saved.db"


def test_a_backup_has_all_of_the_store_and_is_its_owners_alone(store, url, open_at, tmp_path):
    fill(store)
    store.append([EVENT])
    wanted = content(store)
    size_bytes = backup(url, tmp_path / "b.db")
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith((".", "b"))] == ["b.db"]
    found = (tmp_path / "b.db").stat()
    assert (found.st_mode & 0o777, found.st_size) == (0o600, size_bytes)
    checked = verify(sqlite_url(tmp_path / "b.db"))
    assert (checked.findings, checked.version, checked.rows["events"]) == ([], schema.VERSION, 11)
    again = open_at(sqlite_url(tmp_path / "b.db"))
    assert content(again) == wanted
    assert submit(again, "job-0") == {"id": "job-0"} and again.append([EVENT]) == [12]


def test_a_backup_holds_no_token(store, url, tmp_path):
    fill(store)
    backup(url, tmp_path / "b.db")
    assert store._writer._token.encode() not in (tmp_path / "b.db").read_bytes()
    with closing(sqlite3.connect(tmp_path / "b.db")) as copy:
        assert copy.execute("SELECT count(*) FROM writer").fetchall() == [(0,)]


def test_a_backup_taken_while_a_server_writes_is_one_moment_of_it(store, url, tmp_path, wait_for):
    acked, stop = [], threading.Event()

    def write(thread):
        number = 0
        while not stop.wait(0.005):
            submit(store, f"{thread}-{number}")
            acked.append(f"{thread}-{number}")
            number += 1

    threads = [threading.Thread(target=write, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(3):
            wait_for(lambda number=number: len(acked) > 20 * number)
            before = set(acked)
            file = tmp_path / f"{number}.db"
            backup(url, file)
            with closing(sqlite3.connect(file)) as copy:
                rows = copy.execute("SELECT seq, job, event FROM events ORDER BY seq").fetchall()
                keys = {key for (key,) in copy.execute("SELECT key FROM requests")}
            assert [seq for seq, _, _ in rows] == list(range(1, len(rows) + 1))
            assert (
                {job for _, job, event in rows if event == "submitted"}
                == keys
                == {j for _, j, e in rows if e == "cancelled"}
            )
            assert before <= keys
    finally:
        stop.set()
        for thread in threads:
            thread.join(LIMIT_S)


def test_a_backup_never_takes_the_place_of_a_file(store, url, tmp_path):
    (tmp_path / "b.db").write_text("precious")
    with pytest.raises(UserError, match="already exists; name another file"):
        backup(url, tmp_path / "b.db")
    assert (tmp_path / "b.db").read_text() == "precious"


def test_a_backup_of_nothing_says_so_and_makes_nothing(url, tmp_path):
    with pytest.raises(UserError, match="there is no"):
        backup(url, tmp_path / "b.db")
    assert not [f for f in tmp_path.iterdir() if "b.db" in f.name]


def test_a_folder_that_is_not_there_is_named(store, url, tmp_path):
    with pytest.raises(FleetError, match=r"absent/b\.db cannot be written: No such file"):
        backup(url, tmp_path / "absent" / "b.db")


# -- restore


def test_a_restored_store_is_the_one_that_was_saved_and_the_one_before_is_kept(saved, url, open_at, postgresql):
    kept = restore(url, saved)
    store = open_at(url)
    assert [len(part) for part in content(store)[1:]] == [10, 10, 5]
    assert submit(store, "job-0") == {"id": "job-0"}
    assert submit(store, "job-5") == {"id": "job-5"} and store.last_seq == 12
    store.benchmarks.append("run", {"line": "result"})
    if url.startswith("sqlite"):
        assert verify(sqlite_url(Path(kept))).rows["events"] == 14
        assert Path(kept).stat().st_mode & 0o777 == 0o600
    else:
        schema_name = kept.split()[1]
        assert postgresql.sql(url, f"SELECT count(*) FROM {schema_name}.events") == [(14,)]


def test_what_a_killed_server_left_in_the_log_is_in_the_kept_one_and_not_in_the_restored(saved_file, tmp_path):
    url = f"sqlite:///{tmp_path / 'polyfleet.db'}"
    shutil.copy(saved_file, tmp_path / "polyfleet.db")
    code = "import os, sys; from orchestrator.core.model import Event;"
    code += "from orchestrator.store.events.event_store import EventStore;"
    code += "EventStore(sys.argv[1]).append([Event('late', 'x', 1, 1.0)]); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, url], cwd=ROOT, check=False)
    assert (tmp_path / "polyfleet.db-wal").stat().st_size > 0
    kept = restore(url, saved_file)
    assert verify(sqlite_url(Path(kept))).rows["events"] == 11
    assert verify(url).rows["events"] == 10 and not (tmp_path / "polyfleet.db-wal").exists()


def test_jobs_move_from_one_kind_of_database_to_the_other(tmp_path, postgresql_url, open_at):
    sqlite = f"sqlite:///{tmp_path / 'polyfleet.db'}"
    store = open_at(sqlite)
    fill(store)
    wanted = content(store)
    store.close()
    backup(sqlite, tmp_path / "to.db")
    assert restore(postgresql_url, tmp_path / "to.db") == ""
    moved = open_at(postgresql_url)
    assert content(moved) == wanted
    fill(moved, 5, 1)
    wanted = content(moved)
    moved.close()
    backup(postgresql_url, tmp_path / "back.db")
    restore(sqlite, tmp_path / "back.db")
    assert content(open_at(sqlite)) == wanted


def test_a_restore_is_refused_while_a_server_has_the_database(saved, url, open_at):
    store = open_at(url)
    with pytest.raises(FleetError, match="another server has"):
        restore(url, saved)
    assert len(store.read(0)) == 14 and store.append([EVENT]) == [15]


def test_a_backup_of_another_store_is_refused_unless_it_is_meant(saved, url, open_at, tmp_path):
    other = open_at(f"sqlite:///{tmp_path / 'other.db'}")
    fill(other, 0, 1)
    other.close()
    with pytest.raises(Conflict, match="is a backup of another store than"):
        restore(url, tmp_path / "other.db")
    assert len(open_at(url).read(0)) == 14


def test_with_the_option_another_store_is_restored(saved, url, open_at, tmp_path):
    other = open_at(f"sqlite:///{tmp_path / 'other.db'}")
    fill(other, 0, 1)
    other.close()
    assert restore(url, tmp_path / "other.db", replace_other=True)
    assert len(open_at(url).read(0)) == 2


def damage(file):
    content = bytearray(file.read_bytes())
    content[4096 : len(content) - 4096] = b"\xa5" * (len(content) - 8192)
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[:-5000])


def make_newer(file):
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE schema_version SET version = 99")


def empty(file):
    file.write_bytes(b"")


def text(file):
    file.write_text(
        "no database, but long enough to have a header of a hundred bytes, which this has by now, almost" * 3
    )


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (damage, "damaged"),
        (cut, "damaged"),
        (make_newer, "version 99"),
        (empty, "no job store"),
        (text, "not a job store"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_and_the_store_stays(saved, url, open_at, spoil, told):
    spoil(saved)
    with pytest.raises((FleetError, UserError), match=told):
        restore(url, saved)
    assert len(open_at(url).read(0)) == 14


def test_a_file_that_is_not_there_is_named(url):
    with pytest.raises(UserError, match=r"there is no file /nowhere/x\.db"):
        restore(url, Path("/nowhere/x.db"))


def test_a_damaged_database_is_replaced_and_kept(saved_file, tmp_path, open_at):
    path = tmp_path / "polyfleet.db"
    shutil.copy(saved_file, path)
    damage(path)
    with pytest.raises(FleetError, match=r"damaged .*`polyfleet server restore FILE`"):
        EventStore(f"sqlite:///{path}")
    broken = path.read_bytes()
    kept = restore(f"sqlite:///{path}", saved_file)
    assert Path(kept).read_bytes() == broken
    assert len(open_at(f"sqlite:///{path}").read(0)) == 10


def test_a_restore_into_postgresql_that_is_killed_leaves_the_store_as_it_was(
    saved_there, postgresql, wait_for, open_at
):
    import psycopg

    url, saved = saved_there
    name, _, folder = url.partition("@/")[2].partition("?host=")
    waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with psycopg.connect(dbname=name, host=folder, user=postgresql.user) as other:
        other.execute("LOCK TABLE writer IN SHARE MODE")  # the last table that is moved
        child = subprocess.Popen([sys.executable, "-c", RESTORE, url, str(saved)], cwd=ROOT)
        wait_for(lambda: postgresql.sql(url, waits))
        child.kill()
        child.wait()
    wait_for(lambda: not postgresql.sql(url, waits))
    assert not postgresql.sql(url, "SELECT 1 FROM pg_namespace WHERE nspname LIKE 'polyfleet_replaced%'")

    def opened():
        try:
            return len(open_at(url).read(0)) == 14
        except FleetError as e:
            assert "another server has" in str(e)
            return False

    wait_for(opened)


@pytest.fixture
def saved_there(postgresql_url, open_at, tmp_path):
    store = open_at(postgresql_url)
    fill(store, 0, 7)
    backup(postgresql_url, tmp_path / "saved.db")
    store.close()
    return postgresql_url, tmp_path / "saved.db"


# -- verify


def test_a_sound_store_has_no_findings_while_a_server_writes(store, url, wait_for):
    fill(store)
    wait_for(lambda: len(store.metrics.read("job-4")) == 1)
    checked = verify(url)
    assert checked.findings == [] and checked.remedy == ""
    assert {"events": 10, "requests": 5, "reports": 5, "benchmark_lines": 5}.items() <= checked.rows.items()


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        (
            "UPDATE events SET data = '{' WHERE seq = 3",
            "row 3 of table events (submitted of job-1) has data that is not",
        ),
        ("UPDATE requests SET body = '[]' WHERE key = 'job-1'", "of table requests (requests of job-1) has data that"),
        ("UPDATE reports SET data = ''", "of table reports (reports of job-"),
        (
            "UPDATE benchmark_lines SET data = '1' WHERE seq = 2",
            "row 2 of table benchmark_lines (result of run) has data",
        ),
        ("DROP TABLE reports", "table reports is missing"),
        (
            "UPDATE jobs SET state = 'RUNNING' WHERE id = 'job-1'",
            "the row of job job-1 differs from its events in state",
        ),
    ],
)
def test_what_is_damaged_is_found_and_named_with_the_way_back(store, url, postgresql, statement, told, wait_for):
    fill(store)
    wait_for(lambda: len(store.metrics.read("job-4")) == 1)
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as other, other:
            other.execute(statement)
    else:
        postgresql.sql(url, statement)
    checked = verify(url)
    assert told in checked.findings[0]
    assert "`polyfleet server restore FILE`" in checked.remedy


def test_damaged_pages_are_found(store, tmp_path, sqlite_url):
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    with closing(EventStore(f"sqlite:///{tmp_path / 'x.db'}")) as other:
        other.append([Event("j", "x", 1, 1.0, {"pad": "p" * 3000}) for _ in range(50)])
    damage(tmp_path / "x.db")
    checked = verify(f"sqlite:///{tmp_path / 'x.db'}")
    assert checked.findings and path != tmp_path


def test_a_check_of_another_part_is_asked_too(store, url, monkeypatch):
    monkeypatch.setattr(verifying, "CHECKS", [lambda connection: ["job j is not what its events add up to"]])
    assert verify(url).findings == ["job j is not what its events add up to"]


def test_of_very_many_findings_a_hundred_are_told(store, url, postgresql):
    store.append([EVENT] * 150)
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as other, other:
            other.execute("UPDATE events SET data = 'rot'")
    else:
        postgresql.sql(url, "UPDATE events SET data = 'rot'")
    checked = verify(url)
    assert (len(checked.findings), checked.more_findings) == (100, 50)


def test_a_disk_without_space_for_a_backup_leaves_nothing(store, url, tmp_path):
    """As the limit of a file's size: the copy does not fit."""
    fill(store)
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY));" + BACKUP
    ran = subprocess.run(
        [sys.executable, "-c", code, url, str(tmp_path / "b.db")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1 and "cannot be written" in ran.stderr
    assert not [f for f in tmp_path.iterdir() if "b.db" in f.name]
    assert os.access(tmp_path, os.W_OK) and store.append([EVENT])
