"""Jobs of a server: pages, references and bulk submissions, whatever number of jobs there is."""

import pytest

from cluster.errors import NotFound
from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.runtime.jobs.jobs import Jobs, StoreUnavailable
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.events.unit_of_work import make_metrics_row
from orchestrator.store.rows.job_cache import MAX_ENDED, InvalidEvent

PLACED = {"candidate": 0, "kind": "cpu", "pool": "cpu", "leases": [["cpu-0/cpu", [0]]], "reason": "fits"}


def job(name="j", job_id=""):
    return Job(job_id, name, "run", (Candidate(("cpu",)),), submitted_s=1.0)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'polyfleet.db'}"


@pytest.fixture
def store(url):
    store = EventStore(url)
    yield store
    store.close()


@pytest.fixture
def jobs(store):
    return Jobs(store)


def submit(jobs, *ids, name="j"):
    jobs.commit([submitted(job(name, job_id), {}, 1.0) for job_id in ids])


def cancel(jobs, *ids):
    jobs.commit([Event(job_id, "cancelled", 0, 5.0, {"reason": "asked"}) for job_id in ids])


def ids(page):
    return [record.job.id for record in page.records]


def walk(jobs, limit, **wanted):
    """All pages from the newest to the oldest, as one list with the newest last."""
    before, found, pages = None, [], 0
    while True:
        page = jobs.page(wanted.get("states", ()), before, limit, wanted.get("name", ""))
        found, before, pages = [*ids(page), *found], page.before, pages + 1
        assert len(page.records) <= limit
        if before is None:
            return found, pages


def test_pages_go_through_all_jobs_once_newest_last(jobs):
    names = [f"j{n:02}" for n in range(25)]
    submit(jobs, *names)
    cancel(jobs, *names[::3])
    submit(jobs, "other", name="k")
    assert ids(jobs.page((), None, 3)) == ["j23", "j24", "other"]
    assert walk(jobs, 10) == ([*names, "other"], 3)
    assert walk(jobs, 26) == ([*names, "other"], 1)
    assert walk(jobs, 4, states=("CANCELLED",))[0] == names[::3]
    assert walk(jobs, 4, states=("CANCELLED", "PENDING"))[0] == [*names, "other"]
    assert walk(jobs, 4, states=("CANCELLED", "PENDING"), name="k")[0] == ["other"]
    assert walk(jobs, 7, name="j")[0] == names
    assert ids(jobs.page(("RUNNING",))) == [] and ids(jobs.page((), 1)) == []


def test_a_page_stays_where_it_was_while_jobs_come_and_end(jobs):
    submit(jobs, "a", "b", "c", "d")
    page = jobs.page((), None, 2)
    submit(jobs, "e")
    cancel(jobs, "b")
    assert ids(jobs.page((), page.before, 2)) == ["a", "b"]


def test_a_page_has_the_newest_metrics_of_its_jobs(url):
    store = EventStore(url)
    submit(Jobs(store), "a", "b", "c")
    store.metrics.queue(make_metrics_row("a", 1, 1, 1.0, {"loss": 2.0}))
    store.metrics.queue(make_metrics_row("a", 1, 2, 1.0, {"loss": 1.0}))
    store.metrics.queue(make_metrics_row("b", 1, 1, 1.0, {"loss": 3.0}))
    store.close()
    store = EventStore(url)
    jobs = Jobs(store)
    jobs.set_metrics("b", {"loss": 0.5})
    assert jobs.page(()).metrics == {"a": {"loss": 1.0}, "b": {"loss": 3.0}, "c": {}}
    assert [jobs.metrics(name) for name in "abc"] == [{"loss": 1.0}, {"loss": 0.5}, {}]
    store.close()


def test_a_reference_is_an_id_the_newest_of_a_name_or_a_unique_prefix(jobs):
    submit(jobs, "train-1a", "train-1b", name="train")
    submit(jobs, "prepare-77", name="train-1")
    assert jobs.find("train-1a").job.id == "train-1a"
    assert jobs.find("train").job.id == "train-1b"
    assert jobs.find("train-1").job.id == "prepare-77"
    assert jobs.find("prep").job.id == "prepare-77"
    with pytest.raises(NotFound, match="'tra' could be any of 2 jobs; give more of the id: train-1a, train-1b"):
        jobs.find("tra")
    for ref in ("nothing", "train-1c", "", "\x00", "\ud800", "%", "tr_", "x" * 500):
        with pytest.raises(NotFound, match="no job"):
            jobs.find(ref)
    with pytest.raises(NotFound, match="train-1a"):
        jobs.find("train-1c")


def test_a_prefix_of_very_many_is_told_with_the_first_few(jobs):
    submit(jobs, *(f"sweep-{n:03}" for n in range(150)), name="x")
    with pytest.raises(NotFound, match="any of 100 jobs or more; give more of the id: sweep-000, sweep-001"):
        jobs.find("sweep")


def test_ended_jobs_are_read_again_once_memory_has_others(jobs):
    names = [f"j{n:05}" for n in range(MAX_ENDED + 5)]
    for start in range(0, len(names), 1000):
        submit(jobs, *names[start : start + 1000])
        cancel(jobs, *names[start : start + 1000])
    assert jobs.open() == []
    assert jobs["j00000"].job.state == "CANCELLED" and jobs["j00000"].reason == "asked"
    assert "j00001" in jobs and "nobody" not in jobs and jobs.get("nobody") is None
    with pytest.raises(InvalidEvent, match="no move for cancelled"):
        cancel(jobs, "j00002")
    with pytest.raises(KeyError):
        jobs["nobody"]


def test_a_turn_is_stored_whole_with_numbers_or_not_at_all(jobs, store):
    stored = jobs.commit([submitted(job("j", "a"), {}, 1.0), Event("a", "placed", 1, 2.0, PLACED)])
    assert [e.seq for e in stored] == [1, 2]
    with pytest.raises(InvalidEvent, match="started is of attempt 7"):
        jobs.commit([Event("a", "started", 7, 3.0)])
    with pytest.raises(InvalidEvent):
        jobs.commit([Event("a", "started", 1, 3.0), Event("a", "released", 1, 3.0), Event("a", "started", 1, 3.0)])
    assert jobs["a"].job.state == "STARTING" and store.last_seq == 2
    store.close()
    with pytest.raises(StoreUnavailable, match="the job store is closed"):
        jobs.commit([Event("a", "started", 1, 3.0)])
    assert jobs["a"].job.state == "STARTING"


def test_jobs_are_counted_by_state(jobs):
    submit(jobs, "a", "b", "c")
    cancel(jobs, "b")
    assert jobs.counts() == {"PENDING": 2, "CANCELLED": 1}


def test_ids_of_many_jobs_of_one_name_differ(jobs):
    assert len({jobs.new_id("sweep") for _ in range(1000)}) == 1000
