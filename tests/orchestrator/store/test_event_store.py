"""What every store promises, whatever database is below."""

import shutil
from dataclasses import replace

import pytest
import sqlalchemy
from patience import LIMIT_S

from cluster.errors import Conflict, FleetError, UserError
from orchestrator.core.jobs.fold import apply, fold, submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.store.database.schema import removals
from orchestrator.store.events.idempotency import IdempotentRequest, StoredResponse
from orchestrator.store.events.retention import ROWS_AT_ONCE, AttemptFolderRef
from orchestrator.store.events.unit_of_work import UnitOfWork, make_metrics_row
from orchestrator.store.events.write_queue import METRICS_PER_WRITE
from orchestrator.store.rows.job_cache import InvalidEvent


def event(job="j", name="started", **data):
    return Event(job, name, 1, 12.5, data)


def test_events_come_back_in_order_with_their_numbers(store):
    first, second, other = event(n=1), event(n=2), event("k")
    assert store.append([first, other]) == [1, 2]
    assert store.append([second]) == [3]
    assert store.append([]) == []
    assert store.read(0) == [replace(first, seq=1), replace(other, seq=2), replace(second, seq=3)]
    assert store.read(1, 1) == [replace(other, seq=2)]
    assert store.read(3) == []
    assert store.events_of("j") == [replace(first, seq=1), replace(second, seq=3)]
    assert store.last_seq == 3


def test_a_store_opened_again_has_everything_and_goes_on_counting(open_store):
    store = open_store()
    store.append([event(n=n) for n in range(5)])
    store.metrics.queue(make_metrics_row("j", 1, 7, 1.0, {"loss": 0.5}))
    store.idempotent("key", "digest", lambda: StoredResponse({"id": "j"}))
    store.close()
    again = open_store()
    assert [e.data["n"] for e in again.read(0)] == [0, 1, 2, 3, 4]
    assert again.last_seq == 5
    assert again.append([event()]) == [6]
    assert again.metrics.last("j") == {"loss": 0.5}
    assert again.idempotent("key", "digest", lambda: StoredResponse({"id": "other"})) == {"id": "j"}


def test_events_of_owners_with_a_prefix(store):
    store.append([event("node/a"), event("nodes"), event("node/b", "drained"), event("Node/c"), event("node/")])
    assert [e.job for e in store.events_below("node/")] == ["node/a", "node/b", "node/"]


def test_events_of_nodes_are_found_without_a_look_at_those_of_all_jobs(open_at, sqlite_url):
    """A server asks for them at its start: a million events are half a gigabyte."""
    store, plans = open_at(sqlite_url), []

    def explain(connection, cursor, statement, parameters, *_):
        if not statement.startswith("EXPLAIN"):
            plans.extend(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all())

    engine = store._database._readers
    sqlalchemy.event.listen(engine, "before_cursor_execute", explain)
    store.events_below("node/")
    sqlalchemy.event.remove(engine, "before_cursor_execute", explain)
    told = [plan.detail for plan in plans]
    assert any("events_of_job (job>? AND job<?)" in line for line in told), told
    assert not any("SCAN events" in line or "rowid<?" in line for line in told), told


@pytest.mark.parametrize(
    "data",
    [
        {"deep": {"a": [1, 2.5, None, True, {"b": "é \u2028 🙂"}]}},
        {"big": 10**30, "small": 1e-300, "text": "x" * 100_000},
        {"quote": "'; DROP TABLE events; --", "nul": "a\0b", "half": "\ud800"},
        {},
    ],
)
def test_any_plain_data_comes_back_as_it_was(store, data):
    store.append([event(**{"data": data})])
    assert store.read(0)[0].data == {"data": data}


def test_numbers_json_cannot_hold_come_back_as_words(store):
    store.append([event(loss=float("nan"), deep=[float("inf"), {"x": float("-inf")}])])
    assert store.read(0)[0].data == {"loss": "NaN", "deep": ["Infinity", {"x": "-Infinity"}]}


@pytest.mark.parametrize("bad", [{"a": object()}, {"a": {1, 2}}, {"a": b"bytes"}])
def test_what_is_not_plain_data_is_refused_and_stores_nothing(store, bad):
    with pytest.raises(UserError, match="not plain data"):
        store.append([event(), event(**bad)])
    assert store.read(0) == []


@pytest.mark.parametrize(
    "bad",
    [
        replace(event(), job="x" * 129),
        replace(event(), job="a\0b"),
        replace(event(), job="\ud800"),
        replace(event(), event="x" * 65),
        replace(event(), time_s=float("nan")),
        replace(event(), epoch=-1),
        replace(event(), epoch=1 << 70),
    ],
)
def test_a_row_no_database_would_take_is_refused_before_it_spoils_a_group(store, bad):
    with pytest.raises(UserError):
        store.append([bad])
    assert store.append([event()]) == [1]


def test_many_threads_lose_nothing_and_each_keeps_its_order(store, together):
    def writer(number):
        return lambda: [store.append([event(f"job-{number}", n=n)])[0] for n in range(25)]

    numbers = together(*(writer(number) for number in range(16)))
    assert sorted(seq for one in numbers for seq in one) == list(range(1, 401))
    assert all(one == sorted(one) for one in numbers)
    for number in range(16):
        assert [e.data["n"] for e in store.events_of(f"job-{number}")] == list(range(25))


def test_a_reader_in_another_thread_sees_what_was_acknowledged(store, together):
    seen = together(lambda: store.append([event()]), lambda: store.wait(0, LIMIT_S) and store.read(0))[1]
    assert [e.job for e in seen] == ["j"]
    assert not store.wait(1, 0.01)


PLACED = {"candidate": 0, "kind": "cpu", "pool": "cpu", "leases": [["cpu-0/cpu", [0]]], "reason": "fits"}


# -- idempotency


def submission(job="j"):
    return submitted(Job(job, "j", "run", (Candidate(("cpu",)),)), {"command": "true"}, 12.5)


def answer(job="j"):
    return StoredResponse({"id": job}, [submission(job)], 201)


def test_the_same_key_and_digest_get_the_first_answer_and_happen_once(store):
    told = []
    assert store.idempotent("key", "digest", lambda: answer("first"), told.extend) == {"id": "first"}
    assert told == [apply(None, replace(submission("first"), seq=1))]
    assert store.idempotent("key", "digest", lambda: answer("second"), told.extend) == {"id": "first"}
    assert [e.job for e in store.read(0)] == ["first"]
    assert len(told) == 1


def test_the_same_key_with_another_digest_is_a_conflict(store):
    store.idempotent("key", "digest", answer)
    with pytest.raises(Conflict, match="the idempotency key 'key' was used with another request; use a new key"):
        store.idempotent("key", "other", answer)
    assert len(store.read(0)) == 1


def test_without_a_key_everything_happens_every_time(store):
    assert store.idempotent("", "digest", answer) == {"id": "j"}
    assert store.idempotent("", "digest", lambda: answer("k")) == {"id": "k"}
    assert len(store.read(0)) == 2


def test_what_failed_is_not_remembered(store):
    def broken():
        raise UserError("no such pool")

    with pytest.raises(UserError, match="no such pool"):
        store.idempotent("key", "digest", broken)
    assert store.idempotent("key", "digest", answer) == {"id": "j"}


def test_many_threads_with_one_key_make_one_job(store, together):
    made = []

    def request():
        return store.idempotent("key", "digest", lambda: made.append(1) or answer(f"job-{len(made)}"))

    assert together(*[request] * 32) == [{"id": "job-1"}] * 32
    assert len(store.read(0)) == len(made) == 1


def test_an_answer_is_the_same_the_first_time_and_later(store):
    body = {"loss": float("nan"), "pair": (1, 2)}
    first = store.idempotent("key", "digest", lambda: StoredResponse(body))
    assert first == store.idempotent("key", "digest", lambda: StoredResponse({})) == {"loss": "NaN", "pair": [1, 2]}


@pytest.mark.parametrize("key", ["x" * 256, "a\nb", "a\0b", "\ud800"])
def test_a_key_that_cannot_be_stored_is_refused(store, key):
    with pytest.raises(UserError, match="cannot be stored"):
        store.idempotent(key, "digest", answer)


def test_requests_that_come_together_are_answered_each_for_itself(store):
    told = []
    store.idempotent("known", "digest", lambda: answer("known"))

    def broken():
        raise UserError("no such pool")

    asked = [
        IdempotentRequest("a", "1", lambda: answer("a")),
        IdempotentRequest("known", "digest", lambda: answer("other")),
        IdempotentRequest("a", "1", lambda: answer("again")),
        IdempotentRequest("", "", lambda: answer("no-key")),
        IdempotentRequest("a", "2", lambda: answer("b")),
        IdempotentRequest("b", "", broken),
        IdempotentRequest("b", "", lambda: answer("b")),
        IdempotentRequest("x" * 256, "", answer),
        IdempotentRequest("known", "other", answer),
    ]
    found = [str(one) if isinstance(one, Exception) else one["id"] for one in store.idempotent_each(asked, told.extend)]
    used = "was used with another request; use a new key"
    refused = [f"the idempotency key 'a' {used}", "no such pool", "b", f"the idempotency key 'known' {used}"]
    assert found[:7] == ["a", "known", "a", "no-key", refused[0], refused[1], refused[2]]
    assert "cannot be stored" in found[7] and found[8] == refused[3]
    assert [r.job.id for r in told] == [e.job for e in store.read(1)] == ["a", "no-key", "b"]
    assert store.idempotent_each([]) == []


def test_of_requests_that_come_together_one_with_a_taken_id_draws_again(store):
    ids = iter(["j", "k"])
    asked = [IdempotentRequest("1", "", lambda: answer("j")), IdempotentRequest("2", "", lambda: answer(next(ids)))]
    assert store.idempotent_each(asked) == [{"id": "j"}, {"id": "k"}]
    assert [e.job for e in store.read(0)] == ["j", "k"] and store.differences() == []


# -- reports


def test_reports_are_read_back_by_job(open_store):
    store = open_store()
    for step in (1, 2):
        store.metrics.queue(make_metrics_row("j", 3, step, 100.0 + step, {"step": step, "loss": 1 / step}))
    store.metrics.queue(make_metrics_row("k", 1, 9, 50.0, {"loss": float("inf")}))
    store.close()
    store = open_store()
    assert store.metrics.read("j") == [
        {"seq": 1, "attempt": 3, "step": 1, "time": 101.0, "metrics": {"step": 1, "loss": 1.0}},
        {"seq": 2, "attempt": 3, "step": 2, "time": 102.0, "metrics": {"step": 2, "loss": 0.5}},
    ]
    assert store.metrics.read("j", after=1) == store.metrics.read("j")[1:]
    assert store.metrics.read("j", 0, 1) == store.metrics.read("j")[:1]
    assert store.metrics.last("j") == {"step": 2, "loss": 0.5}
    assert store.metrics.last("k") == {"loss": "Infinity"}
    assert store.metrics.last("nobody") == {}
    assert store.metrics.lost == 0


@pytest.mark.parametrize(("step", "time_s"), [(10**40, 1.0), ("five", 1.0), (1.5, float("nan")), (None, "now")])
def test_odd_steps_of_users_code_spoil_nothing(open_store, step, time_s):
    store = open_store()
    store.metrics.queue(make_metrics_row("j", 1, step, time_s, {"a": 1}))
    assert store.append([event()]) == [1]
    store.close()
    assert open_store().metrics.last("j") == {"a": 1}


def test_what_is_told_once_events_are_stored_has_the_records_of_their_jobs(store):
    told = []
    drained = Event("node/n0", "drained", 0, 1.0, {"reason": ""})
    store.append([submission("j"), drained], strict=True, stored=told.append)
    store.append([drained], strict=True, stored=told.append)
    assert [[record.job.id for record in records] for records in told] == [["j"], []]


def test_metrics_of_events_are_stored_with_them_after_all_earlier_ones(store):
    for step in range(1, METRICS_PER_WRITE + 10):
        store.metrics.queue(make_metrics_row("j", 1, step, 1.0, {}))
    last = [make_metrics_row("j", 1, step, 1.0, {}) for step in (7001, 7002)]
    assert store.append([submission("j")], strict=True, metrics=last) == [1]
    assert [row["step"] for row in store.metrics.read("j")] == [*range(1, METRICS_PER_WRITE + 10), 7001, 7002]


def test_all_metrics_that_were_queued_before_an_event_are_stored_with_it(store):
    for step in range(3 * METRICS_PER_WRITE):
        store.metrics.queue(make_metrics_row("j", 1, step, 1.0, {}))
    store.append([submission("j")])
    assert len(store.metrics.read("j")) == 3 * METRICS_PER_WRITE


def test_metrics_of_events_that_are_refused_are_not_stored(store):
    with pytest.raises(InvalidEvent):
        store.append([event("j", "started")], strict=True, metrics=[make_metrics_row("j", 1, 1, 1.0, {})])
    assert store.append([submission("k")], metrics=[make_metrics_row("k", 1, 2, 1.0, {})]) == [1]
    assert (store.metrics.read("j"), [row["seq"] for row in store.metrics.read("k")]) == ([], [1])
    assert store.metrics.lost == 0


# -- what is told apart from success


def test_a_closed_store_says_so(store):
    store.close()
    with pytest.raises(FleetError, match="the job store is closed"):
        store.append([event()])


def test_jobs_survive_in_the_log(open_store):
    jobs = [Job(f"j{n}", "j", "run", (Candidate(("any",)),), submitted_s=float(n)) for n in range(3)]
    store = open_store()
    store.append([submitted(job, {"command": "x"}, job.submitted_s) for job in jobs])
    store.close()
    stored = [replace(job, number=number) for number, job in enumerate(jobs, 1)]
    assert [record.job for record in fold(open_store().read(0)).values()] == stored


def test_how_far_an_attempts_events_are_stored_is_the_newest_of_its_reports_and_checkpoints(open_store):
    store = open_store()
    store.append([submission("j"), Event("j", "placed", 1, 2.0, PLACED)])
    store.metrics.queue(make_metrics_row("j", 1, 1, 3.0, {"loss": 1.0}, 120))
    store.append([Event("j", "checkpoint", 1, 4.0, {"pool": "cpu", "path": "x", "step": 1, "at": 240})], strict=True)
    store.metrics.queue(make_metrics_row("j", 1, 2, 5.0, {"loss": 0.5}, 360))
    store.close()
    store = open_store()
    assert store.stored_offset("j", 1) == 360 and store.stored_offset("j", 2) == store.stored_offset("nobody", 1) == 0
    store.append([Event("j", "checkpoint", 1, 6.0, {"pool": "cpu", "path": "x", "step": 3, "at": 480})], strict=True)
    assert store.stored_offset("j", 1) == 480
    store.append([Event("j", "interrupted", 1, 7.0, {"reason": "lost"}), Event("j", "placed", 2, 8.0, PLACED)])
    assert store.stored_offset("j", 2) == 0
    store.metrics.queue(make_metrics_row("j", 2, 1, 9.0, {"loss": 0.4}, 60))
    store.close()
    store = open_store()
    assert (store.stored_offset("j", 1), store.stored_offset("j", 2)) == (480, 60)


def test_a_generation_is_never_given_twice(open_store, together):
    store = open_store()
    first = store.next_generation()
    second = store.next_generation(first + 10**9)
    assert second > first + 10**9 > 10**9
    given = together(*[store.next_generation] * 8)
    assert len(set(given)) == 8 and min(given) > second
    store.close()
    assert open_store().next_generation(7) > max(given)


def test_two_copies_of_a_store_give_different_generations(tmp_path, open_at):
    """Else the servers of two copies of one home would both be obeyed."""
    one, other = tmp_path / "one.db", tmp_path / "other.db"
    store = open_at(f"sqlite:///{one}")
    store.next_generation()
    store.close()
    shutil.copy(one, other)
    assert open_at(f"sqlite:///{one}").next_generation() != open_at(f"sqlite:///{other}").next_generation()


# -- the rows of jobs


def test_events_that_do_not_count_are_refused_with_all_that_came_with_them(store):
    store.append([submission("j")], strict=True)
    with pytest.raises(InvalidEvent, match=r"event 'started' of j is not valid: .*attempt 1"):
        store.append([submission("k"), event("j", "started")], strict=True)
    assert [e.job for e in store.read(0)] == ["j"] and store.jobs.get("k") is None
    assert store.append([submission("k"), Event("node/a", "drained", 0, 1.0)], strict=True) == [2, 3]
    assert store.differences() == []


def test_a_new_job_whose_id_is_taken_gets_another(store):
    ids = iter(["j", "j", "k"])

    def draw():
        return answer(next(ids))

    assert store.idempotent("1", "digest", draw) == {"id": "j"}
    assert store.idempotent("2", "digest", draw) == {"id": "k"}
    with pytest.raises(InvalidEvent, match="already submitted"):
        store.idempotent("3", "digest", lambda: answer("j"))
    assert [e.job for e in store.read(0)] == ["j", "k"]


def test_many_jobs_of_one_request_are_stored_together_or_not_at_all(store):
    with pytest.raises(InvalidEvent):
        store.idempotent("key", "digest", lambda: StoredResponse({}, [submission(f"j{n % 99}") for n in range(100)]))
    assert store.read(0) == []
    store.idempotent("key", "digest", lambda: StoredResponse({}, [submission(f"j{n}") for n in range(1000)]))
    assert len(store.jobs.open()) == 1000 and store.differences() == []


def test_lines_of_benchmark_runs_are_kept_in_order_and_counted(open_store):
    store = open_store()
    for line in ({"line": "started", "n": 1}, {"line": "result", "n": 2}, {"line": "result", "n": 3}):
        store.benchmarks.append("bench-1", line)
    store.benchmarks.append("bench-2", {"line": "started"})
    assert store.benchmarks.result_counts() == {"bench-1": 2}
    store.benchmarks.append("bench-1", {"line": "ended", "state": "SUCCEEDED"})
    store.benchmarks.append("bench-2", {"line": "result"})
    assert store.benchmarks.result_counts() == {"bench-1": 2, "bench-2": 1}
    store.close()
    again = open_store()
    lines = again.benchmarks.read("bench-1")
    assert [(line["line"], line.get("n")) for line in lines] == [
        ("started", 1),
        ("result", 2),
        ("result", 3),
        ("ended", None),
    ]
    assert again.benchmarks.read("bench-1", lines[2]["seq"]) == lines[3:]
    first, second = again.benchmarks.runs()
    assert (first["ended"]["state"], second["ended"], first["results"], first["baseline"]) == (
        "SUCCEEDED",
        None,
        2,
        None,
    )
    assert again.last_seq == 0


def test_folders_that_are_left_to_remove_are_paged_by_node(store):
    mine = [AttemptFolderRef("a", f"j{n:03}", epoch) for n in range(300) for epoch in (1, 2)]
    places = [*mine, AttemptFolderRef("b", "j000", 1)]
    rows = [{"job": place.job, "node": place.node, "epoch": place.epoch, "time": 1.0} for place in places]
    store._writer.submit(UnitOfWork(action=lambda connection: connection.execute(removals.insert(), rows)))
    kept = store.retention
    first = kept.folders("a")
    assert kept.nodes() == ["a", "b"] and [*first, *kept.folders("a", first[-1])] == mine
    assert len(first) == ROWS_AT_ONCE and kept.folders("a", mine[-1]) == []
    kept.folders_removed(first)
    kept.give_up("b", 2.0)
    assert kept.nodes() == ["a"] and kept.folders("a") == mine[ROWS_AT_ONCE:]
