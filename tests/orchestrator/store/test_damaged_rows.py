"""A real database, written to by another program: rows are named and left out, the rest goes on."""

import sqlite3

import pytest

from cluster.errors import FleetError
from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.core.states import State
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.store.events import database_setting
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.events.idempotency import StoredResponse
from orchestrator.store.events.unit_of_work import make_metrics_row

LEASES = [["cpu-0/cpu", [0]]]
PLACED = {"candidate": 0, "kind": "cpu", "pool": "cpu", "leases": LEASES, "reason": "fits"}


def life(name):
    """The events of a job that runs."""
    job = Job(name, name, "run", (Candidate(("cpu",)),))
    return [
        submitted(job, {"command": "true"}, 1.0),
        Event(name, "placed", 1, 2.0, PLACED),
        Event(name, "started", 1, 3.0),
        Event(name, "checkpoint", 1, 4.0, {"pool": "cpu", "path": f"{name}/step-1", "step": 1}),
    ]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "polyfleet.db"
    store = EventStore(f"sqlite:///{path}")
    store.append([*life("bad"), *life("good")])
    store.metrics.queue(make_metrics_row("bad", 1, 1, 1.0, {"loss": 0.5}))
    store.idempotent("key", "digest", lambda: StoredResponse({"id": "bad"}))
    store.benchmarks.append("run-1", {"line": "started", "cases": 1})
    store.close()
    return path


@pytest.fixture
def reopened(file):
    """The store after a statement of SQL from elsewhere."""
    opened = []

    def after(*statements):
        with sqlite3.connect(file) as connection:
            for statement in statements:
                connection.execute(*statement if isinstance(statement, tuple) else (statement,))
        connection.close()
        opened.append(EventStore(f"sqlite:///{file}"))
        return opened[-1]

    yield after
    for store in opened:
        store.close()


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        (
            "UPDATE events SET data = '{\"half' WHERE seq = 2",
            "row 2 of table events (placed of bad) has data that is not",
        ),
        ("UPDATE events SET data = '[1]' WHERE seq = 2", "row 2 of table events (placed of bad) has data that is not"),
        (
            ("UPDATE events SET data = ? WHERE seq = 2", ["[" * 100_000]),
            "row 2 of table events (placed of bad) has data",
        ),
        (("UPDATE events SET data = CAST(? AS TEXT) WHERE seq = 2", [b"\xff\xfe"]), "data that is not text"),
        (
            "UPDATE events SET data = '{}' WHERE seq = 2",
            "row 2 of table events (placed of bad) cannot be used: KeyError",
        ),
        ("UPDATE events SET epoch = 'one' WHERE seq = 2", "has an epoch that is not a number"),
        ("UPDATE events SET time = 'noon' WHERE seq = 2", "has a time that is not a number"),
        ("UPDATE events SET event = 'frobbed' WHERE seq = 2", "row 2 of table events (frobbed of bad) cannot be used"),
        ("DELETE FROM events WHERE seq = 2", "row 3 of table events (started of bad) cannot be used"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_and_its_job_may_not_go_on_while_others_are_whole(
    reopened, statement, named
):
    store = reopened(statement)
    jobs = Jobs(store)
    assert jobs.check_histories() == 2
    [row] = store.damage.rows
    assert named in str(row)
    assert jobs.damaged == {"bad": str(row)}
    assert jobs["good"].job.state is State.RUNNING and jobs["good"].checkpoint
    assert "bad" in jobs


def test_a_damaged_job_stays_so_when_the_store_is_opened_again(reopened):
    store = reopened("UPDATE events SET data = '{}' WHERE seq = 2")
    Jobs(store).check_histories()
    store.close()
    assert list(Jobs(reopened()).damaged) == ["bad"]


def test_a_row_and_events_that_disagree_are_named(reopened):
    store = reopened("""UPDATE events SET data = replace(data, '"pool":"cpu"', '"pool":"other"') WHERE seq = 2""")
    jobs = Jobs(store)
    jobs.check_histories()
    assert jobs.damaged == {"bad": "its events lead to another state than the stored one"}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE jobs SET data = replace(data, 'cpu-0', 'cpu-1') WHERE id = 'bad'",
        "UPDATE jobs SET data = 'rot' WHERE id = 'bad'",
        "UPDATE jobs SET data = 7 WHERE id = 'bad'",
        "UPDATE jobs SET state = 'PENDING' WHERE id = 'bad'",
        "UPDATE jobs SET data = (SELECT data FROM jobs WHERE id = 'good'), digest = (SELECT digest FROM jobs"
        " WHERE id = 'good') WHERE id = 'bad'",
        "UPDATE jobs SET version = 'older' WHERE id = 'bad'",
    ],
)
def test_a_row_of_a_job_that_cannot_be_read_is_made_anew_from_its_events(reopened, statement, caplog):
    store = reopened(statement)
    reading = "rebuilding 1 job from the log of events: rows are damaged or of another version"
    assert reading in caplog.messages
    jobs = Jobs(store)
    assert [r.job.id for r in jobs.open()] == ["bad", "good"] and jobs.damaged == {}
    assert jobs["bad"].job.state is State.RUNNING and jobs["bad"].live_attempt.allocation == (("cpu-0/cpu", (0,)),)
    assert store.differences() == []
    assert len(store.damage.rows) == ("version" not in statement)


def test_a_row_and_its_events_both_damaged_leave_what_can_be_told_and_the_job_may_not_go_on(reopened):
    store = reopened("UPDATE jobs SET data = 'rot' WHERE id = 'bad'", "UPDATE events SET data = 'rot' WHERE seq = 2")
    jobs = Jobs(store)
    assert list(jobs.damaged) == ["bad"] and jobs["bad"].job.state is State.PENDING
    assert {row.table for row in store.damage.rows} == {"jobs", "events"}


def test_a_job_of_which_nothing_can_be_read_is_left_out_and_told(reopened):
    store = reopened("UPDATE jobs SET data = 'rot' WHERE id = 'bad'", "UPDATE events SET data = 'rot' WHERE seq = 1")
    jobs = Jobs(store)
    assert list(jobs.damaged) == ["bad"] and "bad" not in jobs
    assert [r.job.id for r in jobs.open()] == ["good"]
    jobs.commit([Event("good", "finished", 1, 9.0, {"reason": "done"})])
    assert [r.job.id for r in jobs.page(()).records] == ["good"]


def test_a_lost_note_of_a_checkpoint_does_not_stop_a_job(reopened):
    store = reopened("UPDATE events SET data = 'rot' WHERE seq = 4")
    jobs = Jobs(store)
    jobs.check_histories()
    assert jobs.damaged == {} and jobs["bad"].job.state is State.RUNNING
    assert "row 4 of table events (checkpoint of bad)" in str(store.damage.rows[0])


def test_damaged_rows_of_other_tables_are_named_when_they_are_met(reopened):
    store = reopened(
        "UPDATE reports SET data = 'rot'", "UPDATE requests SET body = 'rot'", "UPDATE benchmark_lines SET data = 'rot'"
    )
    assert store.metrics.read("bad") == [] and store.metrics.last("bad") == {}
    assert store.benchmarks.read("run-1") == [] and store.benchmarks.runs() == []
    with pytest.raises(FleetError, match="'key' is damaged"):
        store.idempotent("key", "digest", lambda: StoredResponse({"id": "twice"}))
    assert {row.table for row in store.damage.rows} == {"reports", "requests", "benchmark_lines"}


def test_a_reader_gets_past_rows_that_cannot_be_read_and_those_that_are_gone(reopened):
    store = reopened("UPDATE events SET data = 'rot' WHERE seq <= 4", "DELETE FROM events WHERE seq > 6")
    assert store.read_with_end(0, 2) == ([], 2) and store.read_with_end(2, 2) == ([], 4)
    found, last = store.read_with_end(4, 10)
    assert ([e.seq for e in found], last) == ([5, 6], 6)
    store.append(life("new"))
    assert ([e.seq for e in store.read_with_end(6, 10)[0]], store.read_with_end(6, 10)[1]) == ([7, 8, 9, 10], 10)
    assert store.read_with_end(10, 10) == ([], 10) and store.read_with_end(99, 10) == ([], 99)


def test_the_state_of_a_store_tells_its_size_its_room_and_its_damage(reopened):
    store = reopened("UPDATE events SET data = 'rot' WHERE seq = 4")
    Jobs(store).check_histories()
    state = store.state()
    assert state.error == "" and state.size_bytes > 0 and state.free_bytes > 0
    assert state.damage.count == 1


def test_a_database_has_a_name_that_a_copy_keeps_and_a_new_one_has_not(reopened, tmp_path, file):
    first = reopened()
    name = first.identity
    first.close()
    assert reopened().identity == name and len(name) == 32
    other = EventStore(f"sqlite:///{tmp_path / 'other.db'}")
    assert other.identity != name
    other.close()


def test_a_fleet_remembers_the_database_it_began_with(tmp_path):
    assert not database_setting.is_other_database(tmp_path, "127.0.0.1:1", "a")
    assert not database_setting.is_other_database(tmp_path, "127.0.0.1:1", "a")
    assert database_setting.is_other_database(tmp_path, "127.0.0.1:1", "b")
    assert not database_setting.is_other_database(tmp_path, "127.0.0.1:2", "b")
    (tmp_path / database_setting.ORIGIN_FILE).write_text("[")
    assert not database_setting.is_other_database(tmp_path, "127.0.0.1:2", "b")
    assert database_setting.is_other_database(tmp_path, "127.0.0.1:2", "c")


def test_a_failed_write_is_told_until_one_succeeds(reopened, file):
    store = reopened()
    with sqlite3.connect(file) as other:
        other.execute("ALTER TABLE events RENAME TO gone")
    other.close()
    with pytest.raises(FleetError):
        store.append(life("new"))
    assert "gone" in store.state().error or "events" in store.state().error
    with sqlite3.connect(file) as other:
        other.execute("ALTER TABLE gone RENAME TO events")
    other.close()
    store.append(life("new"))
    assert store.state().error == ""
    assert [e.event for e in store.events_of("new")] == ["submitted", "placed", "started", "checkpoint"]


def test_after_a_failed_write_the_events_of_a_node_are_no_damage(reopened, file):
    store = reopened()
    store.append([Event("node/cpu-0", "drained", 0, 1.0, {"reason": "asked"})])
    with sqlite3.connect(file) as other:
        other.execute("ALTER TABLE events RENAME TO gone")
    other.close()
    with pytest.raises(FleetError):
        store.append([Event("node/cpu-0", "undrained", 0, 2.0)])
    with sqlite3.connect(file) as other:
        other.execute("ALTER TABLE gone RENAME TO events")
    other.close()
    store.append(life("new"))
    assert [e.event for e in store.events_below("node/")] == ["drained"]
    assert store.damage.count == 0 and store.differences() == []
