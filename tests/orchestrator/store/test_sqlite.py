"""SQLite's own ground: the file, its lock, other programs, damage, a newer version."""

import sqlite3
import subprocess
import sys
import threading

import pytest
from patience import LIMIT_S
from sqlalchemy import create_engine, text, update

from cluster.errors import FleetError, UserError
from orchestrator.core.model import Event
from orchestrator.store.database.schema import VERSION, schema_version, writer
from orchestrator.store.events.event_store import EventStore

EVENT = Event("j", "started", 1, 1.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "polyfleet.db"


@pytest.fixture
def url(sqlite_url):
    return sqlite_url


def test_the_file_and_its_companions_are_its_owners_only(path, store):
    store.append([EVENT])
    files = sorted(path.parent.iterdir())
    assert [f.name for f in files] == ["polyfleet.db", "polyfleet.db-shm", "polyfleet.db-wal", "polyfleet.db.lock"]
    assert {f.stat().st_mode & 0o777 for f in files if f.suffix != ".lock"} == {0o600}


def test_closing_leaves_one_whole_database_without_a_log_beside_it(path, open_store):
    store = open_store()
    store.append([EVENT])
    store.read(0)
    store.close()
    assert sorted(f.name for f in path.parent.iterdir()) == ["polyfleet.db", "polyfleet.db.lock"]


def test_the_writer_is_durable_and_alone_and_readers_only_read(store):
    with store._database.connect() as connection:
        asked = {p: connection.exec_driver_sql(f"PRAGMA {p}").scalar() for p in ("journal_mode", "synchronous")}
        assert connection.exec_driver_sql("PRAGMA mmap_size").scalar() in (0, None)
    assert asked == {"journal_mode": "wal", "synchronous": 2}
    with store._database.reading() as connection:
        assert connection.exec_driver_sql("PRAGMA query_only").scalar() == 1
        assert connection.exec_driver_sql("PRAGMA wal_autocheckpoint").scalar() == 0


def test_a_second_server_is_kept_out_until_the_first_has_gone(url, open_store):
    first = open_store()
    second = [
        sys.executable,
        "-c",
        f"from orchestrator.store.events.event_store import EventStore; EventStore({url!r}).close()",
    ]
    refused = subprocess.run(second, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "another server has" in refused.stderr
    first.close()
    subprocess.run(second, check=True)


def test_a_newer_schema_is_refused_and_left_alone(url, open_store):
    open_store().close()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(update(schema_version).values(version=VERSION + 1))
    engine.dispose()
    with pytest.raises(FleetError, match=f"its schema has version {VERSION + 1}; this one reads up to {VERSION}"):
        open_store()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(update(schema_version).values(version=VERSION))
    engine.dispose()
    assert open_store().append([EVENT]) == [1]


def test_a_server_that_has_been_replaced_writes_no_more(url, store):
    store.append([EVENT])
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(update(writer).values(token="of another"))
    engine.dispose()
    with pytest.raises(FleetError, match="another server has taken over"):
        store.append([EVENT])
    assert len(store.read(0)) == 1


def test_what_is_no_database_is_named_and_not_touched(path, open_store):
    path.write_bytes(b"not a database, but long enough to have a header" * 20)
    before = path.read_bytes()
    with pytest.raises(FleetError, match="is damaged or not a job store"):
        open_store()
    assert path.read_bytes() == before


def test_a_damaged_page_is_told_as_damage(path, open_store):
    store = open_store()
    store.append([Event("j", "started", 1, 1.0, {"x": "y" * 3000}) for _ in range(100)])
    store.close()
    content = bytearray(path.read_bytes())
    content[4096 : len(content) - 4096] = b"\xa5" * (len(content) - 8192)
    path.write_bytes(content)
    with pytest.raises(FleetError, match=r"is damaged or not a job store .*; restore a backup"):
        open_store()


def test_a_database_held_by_another_program_is_told_so(path, store):
    store.append([EVENT])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(FleetError, match="is locked by another program; close the program that has it open"):
        store.append([EVENT])
    other.execute("COMMIT")
    other.close()
    assert store.append([EVENT]) == [2]


def test_a_file_that_is_removed_under_a_server_takes_no_job_and_is_not_made_again(path, store, together):
    store.append([EVENT])
    path.unlink()
    assert "was removed or replaced" in store.state().error
    for _ in range(2):
        with pytest.raises(FleetError, match=r"was removed or replaced .*; stop the server, then"):
            store.append([EVENT])
        with pytest.raises(FleetError, match="was removed or replaced"):
            together(*[lambda: store.read(0)] * 4)
    assert "was removed or replaced" in store.state().error
    assert not path.exists()


def test_a_file_that_is_replaced_under_a_server_is_neither_read_nor_written(path, store, together, tmp_path):
    store.append([EVENT])
    with sqlite3.connect(path) as other:
        other.execute("VACUUM INTO ?", [str(tmp_path / "copy.db")])
    other.close()
    before = (tmp_path / "copy.db").read_bytes()
    kept = path.rename(tmp_path / "kept.db")
    (tmp_path / "copy.db").rename(path)
    for _ in range(2):
        with pytest.raises(FleetError, match="was removed or replaced"):
            store.append([EVENT])
        with pytest.raises(FleetError, match="was removed or replaced"):
            together(*[lambda: store.read(0)] * 4)
    assert path.read_bytes() == before
    kept.rename(path)
    with pytest.raises(FleetError, match="was removed or replaced"):
        store.append([EVENT])


def test_closing_waits_for_who_reads_and_leaves_no_log_behind(path, url):
    store = EventStore(url)
    store.append([EVENT])
    begun, may_end = threading.Event(), threading.Event()

    def reads():
        with store._database.reading() as connection:
            connection.execute(text("SELECT count(*) FROM events")).all()
            begun.set()
            may_end.wait(LIMIT_S)

    reader = threading.Thread(target=reads)
    reader.start()
    begun.wait(LIMIT_S)
    threading.Timer(0.2, may_end.set).start()
    store.close()
    reader.join(LIMIT_S)
    assert not path.with_name(f"{path.name}-wal").exists()
    with pytest.raises(FleetError, match="is being closed"):
        store.read(0)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "nonsense", "mysql+nonsense://x/y"])
def test_a_url_that_names_no_durable_store_is_a_users_error(url):
    with pytest.raises(UserError) as raised:
        EventStore(url)
    assert "sqlite:///" in raised.value.remedy


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FleetError, match="No such file or directory"):
        EventStore(f"sqlite:///{tmp_path / 'absent' / 'x.db'}")
