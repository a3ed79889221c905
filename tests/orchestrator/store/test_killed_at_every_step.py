"""A process that upgrades, saves or restores a store is killed as it makes any of its system calls."""

import shutil
import sys
from contextlib import closing

import next_version
import pytest
from filled_store import BACKUP, RESTORE, fill
from next_version import copies, events_in, is_upgraded

from orchestrator.core.model import Event
from orchestrator.store.database.backup import backup
from orchestrator.store.database.database import sqlite_url
from orchestrator.store.database.restore import restore
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.events.verify import verify

pytestmark = pytest.mark.full

EVENT = Event("j", "started", 1, 1.0)


@pytest.mark.parametrize("call", ["fsync", "link", "pwrite64", "fdatasync", "unlink"])
def test_kill_9_at_any_step_leaves_the_old_database_or_the_new_one(tmp_path, kill_at, monkeypatch, call):
    """The process is killed as it makes its first, second, third … call of a kind, until it makes no more of them."""
    with closing(EventStore(f"sqlite:///{tmp_path / 'old.db'}")) as store:
        fill(store)
    old, newer = events_in(tmp_path / "old.db"), next_version.write_migrations(tmp_path / "migrations")
    before = after = 0
    for number in (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 25, 30, 40, 50, 70, 100, 150, 220, 320, 500):
        path = tmp_path / str(number) / "polyfleet.db"
        path.parent.mkdir()
        shutil.copyfile(tmp_path / "old.db", path)
        killed = kill_at(call, number, next_version.open_command(newer, f"sqlite:///{path}"))
        assert events_in(path) == old
        before, after = before + (not is_upgraded(path)), after + is_upgraded(path)
        assert all(events_in(copy) == old for copy in copies(path))
        with monkeypatch.context() as later:
            next_version.use(later, newer)
            with closing(EventStore(f"sqlite:///{path}")) as store:
                assert store.append([EVENT]) == [11]
        assert is_upgraded(path) and copies(path) and not list(path.parent.glob(".*.part"))
        if not killed:
            break
    assert not killed and after
    assert before or call in ("link", "unlink")


@pytest.mark.parametrize("call", ["fsync", "link", "pwrite64"])
def test_a_backup_that_is_killed_is_whole_or_not_there(tmp_path, kill_at, call):
    with closing(EventStore(f"sqlite:///{tmp_path / 'polyfleet.db'}")) as store:
        fill(store)
    for number in (1, 2, 3, 4, 6, 9, 14, 20, 30, 50):
        file = tmp_path / f"{number}.db"
        killed = kill_at(call, number, [sys.executable, "-c", BACKUP, f"sqlite:///{tmp_path}/polyfleet.db", str(file)])
        assert file.exists() or killed
        if file.exists():
            assert verify(sqlite_url(file)).rows["events"] == 10 and not verify(sqlite_url(file)).findings
        if not killed:
            break
    assert not killed


@pytest.mark.parametrize("call", ["rename", "link", "pwrite64", "fsync", "unlink"])
def test_a_restore_that_is_killed_leaves_the_one_store_or_the_other(tmp_path, kill_at, call):
    home = tmp_path / "home"
    home.mkdir()
    with closing(EventStore(f"sqlite:///{home / 'polyfleet.db'}")) as store:
        fill(store)
        backup(f"sqlite:///{home / 'polyfleet.db'}", tmp_path / "saved.db")
        fill(store, 5, 2)
    url, last = f"sqlite:///{home / 'polyfleet.db'}", 14
    for number in (1, 2, 3, 4, 5, 7, 10, 15, 25, 40, 60):
        killed = kill_at(call, number, [sys.executable, "-c", RESTORE, url, str(tmp_path / "saved.db")])
        found = verify(url)
        assert found.findings == [] and found.rows["events"] in (10, 14) and found.rows["events"] <= last
        assert found.rows["events"] == 14 or any(
            verify(sqlite_url(kept)).rows["events"] == 14 for kept in home.glob("polyfleet-replaced-*.db")
        )
        last = found.rows["events"]
        if not killed:
            break
    assert not killed and last == 10
    restore(url, tmp_path / "saved.db")
    kept = list(home.glob("polyfleet-replaced-*.db"))
    assert all(file.stat().st_nlink == 1 for file in [*kept, home / "polyfleet.db"])
    assert not list(home.glob(".*"))
