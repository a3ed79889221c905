"""Old jobs are removed with all that belongs to them, whenever the server is killed; nothing younger is touched."""

import signal
import sqlite3
import subprocess
import sys
import time

import pytest
import sqlalchemy
from patience import LIMIT_S, wait_for
from store_writers import KILLED_BEFORE_A_STATEMENT

from cluster.errors import FleetError, NotFound, UserError
from cluster.host import fences
from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.runtime.jobs import cleanup
from orchestrator.runtime.jobs.cleanup import Clock, Housekeeping, keep_jobs_s
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.events.idempotency import StoredResponse
from orchestrator.store.events.retention import AttemptFolderRef
from orchestrator.store.events.unit_of_work import make_metrics_row
from orchestrator.store.events.verify import verify

DAY_S = 86400.0
PLACED = {
    "candidate": 0,
    "kind": "cpu",
    "pool": "cpu",
    "leases": [["cpu-0/cpu", [0]], ["cpu-1/cpu", [0]]],
    "reason": "",
}


def life(job, ended_s, release=True):
    """A job that ran on two nodes and was cancelled."""
    wanted = Job(job, job, "run", (Candidate(("cpu",)),), submitted_s=ended_s - 3)
    return [
        submitted(wanted, {}, ended_s - 3),
        Event(job, "placed", 1, ended_s - 2, PLACED),
        Event(job, "cancelled", 1, ended_s, {"reason": "asked"}),
        *([Event(job, "released", 1, ended_s, {"reason": "stopped"})] if release else []),
    ]


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'polyfleet.db'}"


def filled(url):
    """Two old jobs, one old that still holds devices, one of yesterday; keys, reports and lines of a benchmark run."""
    store, now_s = EventStore(url), time.time()
    for job, days, release in (("old-1", 40, True), ("held", 40, False), ("old-2", 35, True), ("young", 1, True)):
        made = life(job, now_s - days * DAY_S, release)
        store.idempotent(f"key-{job}", "digest", lambda job=job, made=made: StoredResponse({"id": job}, made))
        for step in range(3):
            store.metrics.queue(make_metrics_row(job, 1, step, 1.0, {"loss": 1.0}))
    store.benchmarks.append("run-1", {"line": "started"})
    store.close()
    with sqlite3.connect(url.removeprefix("sqlite:///")) as other:
        other.execute("UPDATE requests SET time = time - 40 * 86400 WHERE key LIKE '%old%'")
    other.close()


def rows(url):
    with sqlite3.connect(url.removeprefix("sqlite:///")) as other:
        return {
            table: {row[0] for row in other.execute(f"SELECT {column} FROM {table}")}
            for table, column in (("events", "job"), ("reports", "job"), ("jobs", "id"), ("requests", "key"))
        }


def keeper(store, forget=lambda places: places, keep_s=30 * DAY_S):
    return Housekeeping(Jobs(store), store, forget, keep_s)


def test_jobs_that_ended_long_ago_are_removed_with_their_events_reports_keys_and_folders(url):
    filled(url)
    store, asked = EventStore(url), []
    keeper(store, lambda places: asked.extend(places) or places).prune()
    jobs = Jobs(store)
    with pytest.raises(NotFound, match="no job 'old-1'"):
        jobs.find("old-1")
    assert {r.job.id for r in jobs.page(()).records} == {"held", "young"}
    left = {"held", "young"}
    assert rows(url) == {"events": left, "reports": left, "jobs": left, "requests": {"key-held", "key-young"}}
    assert set(asked) == {AttemptFolderRef(f"cpu-{n}", job, 1) for job in ("old-1", "old-2") for n in (0, 1)}
    assert store.retention.nodes() == [] and store.differences() == []
    assert [line["line"] for line in store.benchmarks.read("run-1")] == ["started"]
    store.close()


def away(*nodes):
    """All other nodes remove their folders."""

    def forget(places):
        if {place.node for place in places} & set(nodes):
            raise FleetError("no answer", "wait")
        return places

    return forget


def left_to_remove(url, node, count, days=0.0):
    """Folders there, of so many jobs that were removed so long ago."""
    rows = [(f"{node}-{n}", node, 1, time.time() - days * DAY_S) for n in range(count)]
    with sqlite3.connect(url.removeprefix("sqlite:///")) as other:
        other.executemany("INSERT INTO removals (job, node, epoch, time) VALUES (?, ?, ?, ?)", rows)
    other.close()


def counted(url):
    """How many folders are left to remove, by node."""
    with sqlite3.connect(url.removeprefix("sqlite:///")) as other:
        found = other.execute("SELECT node, count(*) FROM removals WHERE node != '' GROUP BY node").fetchall()
    other.close()
    return dict(found)


def test_a_node_that_is_gone_keeps_no_other_waiting(url):
    store = EventStore(url)
    left_to_remove(url, "gone", 500, days=2)
    left_to_remove(url, "there", 3)
    keeper(store, away("gone")).prune()
    assert counted(url) == {"gone": 500}
    store.close()


def test_all_folders_on_a_node_are_removed_at_once(url):
    store = EventStore(url)
    left_to_remove(url, "there", 1200)
    keeper(store).prune()
    assert counted(url) == {}
    store.close()


def test_only_a_node_that_does_not_answer_is_left_its_old_folders(url):
    store = EventStore(url)
    for node in ("gone", "there"):
        left_to_remove(url, node, 2, days=31)
    left_to_remove(url, "away", 2, days=29)
    answers = away("gone", "away")
    keeper(store, lambda places: answers(places) and []).prune()
    assert counted(url) == {"there": 2, "away": 2}
    store.close()


def test_folders_on_nodes_that_are_away_are_asked_for_again(url):
    filled(url)
    store = EventStore(url)
    keeper(store, away("cpu-1")).prune()
    assert store.retention.nodes() == ["cpu-1"]
    store.close()
    store, asked = EventStore(url), []
    keeper(store, lambda places: asked.extend(places) or places).prune()
    assert {place.node for place in asked} == {"cpu-1"} and store.retention.nodes() == []
    store.close()


def test_numbers_are_not_given_again_after_the_newest_events_are_gone(url):
    filled(url)
    store = EventStore(url)
    last = store.last_seq
    assert store.retention.remove_jobs(time.time(), last) == 3
    while store.retention.remove_rows():
        pass
    store.close()
    store = EventStore(url)
    assert rows(url)["events"] == {"held"} and store.last_seq == last
    assert store.append(life("new", time.time())[:1], strict=True) == [last + 1]
    store.close()


def test_a_job_being_removed_is_told_apart_from_one_that_never_was(url):
    filled(url)
    store = EventStore(url)
    assert store.retention.remove_jobs(time.time() - 30 * DAY_S, store.last_seq) == 2
    with pytest.raises(NotFound, match=r"job 'old-1' was removed; .*POLYFLEET_KEEP_JOBS"):
        Jobs(store).find("old-1")
    assert store.differences() == []
    store.close()


KILLED = (
    """
import os, sys
from orchestrator.store.events.event_store import EventStore
from orchestrator.runtime.jobs.cleanup import Housekeeping
from orchestrator.runtime.jobs.jobs import Jobs
from sqlalchemy import event

store = EventStore(sys.argv[1])
left = int(sys.argv[2])

"""
    + KILLED_BEFORE_A_STATEMENT
    + """
Housekeeping(Jobs(store), store, lambda places: places, 30 * 86400.0).prune()
store.close()
"""
)


def test_kill_9_before_any_statement_leaves_a_whole_store_that_the_next_server_goes_on_with(tmp_path):
    for number in (0, 3, 4, 6, 9, 13, 40):
        url = f"sqlite:///{tmp_path / str(number)}.db"
        filled(url)
        ran = subprocess.run([sys.executable, "-c", KILLED, url, str(number)], check=False)
        assert ran.returncode == (-signal.SIGKILL if number < 40 else 0)
        store = EventStore(url)
        assert store.differences() == [] and store.damage.count == 0
        kept = rows(url)["jobs"]
        assert kept in ({"old-1", "old-2", "held", "young"}, {"held", "young"})
        keeper(store).prune()
        assert rows(url)["events"] == rows(url)["reports"] == rows(url)["jobs"] == {"held", "young"}
        assert store.retention.nodes() == [] and store.last_seq == 15
        store.close()


def test_what_ended_while_the_clock_was_wrong_is_kept_as_long_as_any_other(url, monkeypatch):
    store = EventStore(url)
    at_start = keeper(store)
    store.append(life("j", time.time() - 3650 * DAY_S), strict=True)
    at_start.prune()
    assert Jobs(store).find("j")
    wall_s = time.time
    monkeypatch.setattr(time, "time", lambda: wall_s() + 3650 * DAY_S)
    store.append(life("k", time.time()), strict=True)
    at_start.prune()
    assert Jobs(store).find("k")
    store.close()


def test_a_server_that_starts_with_a_clock_years_ahead_removes_nothing(url, monkeypatch):
    """What ended a month before the newest event is removed all the same: no clock is asked for that."""
    filled(url)
    store, wall_s = EventStore(url), time.time
    monkeypatch.setattr(time, "time", lambda: wall_s() + 3650 * DAY_S)
    keeper(store, keep_s=60 * DAY_S).prune()
    assert {r.job.id for r in Jobs(store).page(()).records} == {"old-1", "held", "old-2", "young"}
    assert len(rows(url)["requests"]) == 4
    keeper(store).prune()
    assert {r.job.id for r in Jobs(store).page(()).records} == {"held", "young"}
    store.close()


def test_a_clock_goes_by_time_that_passed_and_marks_what_is_old():
    clock = Clock(5, None, 0.0)
    assert (clock.newest_old_event(9), clock.newest_old_event(12)) == (9, 12)
    clock = Clock(5, None, 1000.0)
    assert (clock.newest_old_event(9), clock.newest_old_event(12)) == (5, 5)
    assert abs(clock.now_s() - time.time()) < 60
    assert abs(Clock(5, 1e9, 1000.0).now_s() - 1e9) < 60, "the newest event is of then"
    assert abs(Clock(5, 1e12, 1000.0).now_s() - time.time()) < 60, "it was written with a clock far ahead"


def test_histories_are_read_again_after_a_store_that_could_not_be_read(url, monkeypatch, caplog):
    filled(url)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as other:
        other.execute("UPDATE events SET data = 'rot' WHERE job = 'held' AND event = 'placed'")
    other.close()
    store, told, failures = EventStore(url), [], [FleetError("the store is locked")]
    jobs = Jobs(store)
    check = jobs.check_histories
    monkeypatch.setattr(cleanup, "CHECK_RETRY_S", 0.01)
    monkeypatch.setattr(jobs, "check_histories", lambda pause: failing(failures) or check(pause))
    thread = Housekeeping(jobs, store, lambda places: places, None, lambda job, why: told.append(job))
    thread.start()
    wait_for(lambda: told)
    thread.close()
    thread.join(LIMIT_S)
    assert told == ["held"] and "reading the histories of open jobs: the store is locked" in caplog.text
    store.close()


def failing(errors):
    if errors:
        raise errors.pop()


def test_the_setting_is_a_duration_or_forever():
    assert keep_jobs_s({}) == 30 * DAY_S
    assert keep_jobs_s({cleanup.SETTING: "12h"}) == DAY_S / 2
    assert keep_jobs_s({cleanup.SETTING: "Forever"}) is None
    with pytest.raises(UserError, match=r"POLYFLEET_KEEP_JOBS: 'a month' is not a duration; write e.g."):
        keep_jobs_s({cleanup.SETTING: "a month"})


def test_the_thread_reads_histories_and_removes_what_is_old_until_it_is_closed(url):
    filled(url)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as other:
        other.execute("UPDATE events SET data = 'rot' WHERE job = 'held' AND event = 'placed'")
    other.close()
    store = EventStore(url)
    done, told = [], []

    def forget(places):
        done.extend(places)
        return places

    thread = Housekeeping(Jobs(store), store, forget, 30 * DAY_S, lambda *distrusted: told.append(distrusted))
    thread.start()
    wait_for(lambda: done and not store.retention.nodes())
    thread.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert [job for job, _ in told] == list(store.jobs.damaged) == ["held"] and rows(url)["jobs"] == {"held", "young"}
    store.close()


def older(url, where="true"):
    """Rows of jobs as another version of Polyfleet wrote them."""
    with sqlite3.connect(url.removeprefix("sqlite:///")) as other:
        other.execute(f"UPDATE jobs SET version = 'another', digest = 7, data = '{{\"fields\": 1}}' WHERE {where}")
    other.close()


def folds_of_a_page(store):
    """How often a list looks into the events."""
    asked = []

    def counted(connection, cursor, statement, *_):
        asked.append("FROM events" in statement)

    engine = store._database._readers
    sqlalchemy.event.listen(engine, "before_cursor_execute", counted)
    found = store.jobs.page((), "", None, 1000).records
    sqlalchemy.event.remove(engine, "before_cursor_execute", counted)
    return sum(asked), found


def test_rows_of_ended_jobs_that_another_version_wrote_are_sound_and_written_anew(url):
    store, now_s = EventStore(url), time.time()
    for number in range(120):
        store.append(life(f"j{number:03}", now_s))
    before = store.jobs.page((), "", None, 1000).records
    store.close()
    older(url)
    store = EventStore(url)
    assert verify(url).findings == []
    assert folds_of_a_page(store) == (120, before)
    keeper(store).refresh()
    assert folds_of_a_page(store) == (0, before)
    assert verify(url).findings == [] and store.damage.count == 0
    store.close()


def test_a_row_of_another_version_stays_where_its_events_cannot_tell_it_anew(url):
    store = EventStore(url)
    for job in ("whole", "bad", "marked"):
        store.append(life(job, time.time()))
    store.mark_damaged("marked", "seen before")
    store.close()
    older(url)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as other:
        other.execute("UPDATE events SET data = 'rot' WHERE job = 'bad' AND event = 'cancelled'")
    other.close()
    store = EventStore(url)
    keeper(store).refresh()
    store.close()
    with sqlite3.connect(url.removeprefix("sqlite:///")) as other:
        told = other.execute("SELECT id, version = 'another', state, damaged FROM jobs ORDER BY number").fetchall()
    other.close()
    ended = "CANCELLED"
    assert told == [("whole", 0, ended, ""), ("bad", 1, ended, ""), ("marked", 0, ended, "seen before")]


@pytest.fixture
def kept_for_no_time(monkeypatch):
    monkeypatch.setenv(cleanup.SETTING, "0s")


def test_of_a_removed_job_its_node_keeps_no_folder_and_the_fleet_no_fence(kept_for_no_time, live, wait_for):
    """The real way there: the service asks the node's agent, and what that removed has no fence any more."""
    service, attempts = live.service, live.home / "nodes" / "cpu-0" / "attempts"
    ended = live.ran({"task": "run", "name": "j", "command": ["true"], "resources": {"pool": "cpu"}})["id"]
    wait_for(lambda: ended not in service.runtime.control.records)
    (folder,) = attempts.glob(f"{ended}.1.0")
    assert (folder / "outcome.json").exists()
    assert [key.rpartition("/")[2] for key in live.fleet.store.values] == [ended]
    assert fences.read(fences.local_folder(), ended) == 1

    def removed():
        service._housekeeping.prune()
        return ended not in service.jobs_table and service.store.retention.nodes() == []

    wait_for(removed)
    assert [*attempts.parent.rglob(f"{ended}.*")] == [] and live.fleet.store.values == {}
    assert fences.read(fences.local_folder(), ended) is None
    assert ended not in live.fleet.agent("cpu-0").register(service.agents.generation)["epochs"]
