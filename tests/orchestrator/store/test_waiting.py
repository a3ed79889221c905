"""Nobody waits for the store for ever: what a write that does not end keeps waiting is told so, and stays true."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from patience import LIMIT_S

from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.store.events import event_store, idempotency, writer
from orchestrator.store.events.idempotency import IdempotentRequest, StoredResponse
from orchestrator.store.events.unit_of_work import CommitPending, StoreBusy, UnitOfWork


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    monkeypatch.setattr(writer, "WAIT_S", LIMIT_S)
    monkeypatch.setattr(idempotency, "MAX_WAIT_S", LIMIT_S)
    monkeypatch.setattr(event_store, "WRITING_LATE_S", 0.0)


class Disk:
    """Makes the write under way wait, as a disk that does not answer."""

    def __init__(self):
        self.reached, self.answers = threading.Event(), threading.Event()

    def __call__(self, *_):
        self.reached.set()
        assert self.answers.wait(LIMIT_S)


@pytest.fixture
def disk():
    disk = Disk()
    yield disk
    disk.answers.set()


@pytest.fixture
def impatient(monkeypatch, disk):
    """`with impatient():` the store waits for 0.1 and 0.2 s only, from when a write has reached the disk."""
    wait_committed = writer.wait_committed

    def wait(units, until_s):
        begun_s = time.monotonic()
        assert disk.reached.wait(LIMIT_S)
        return wait_committed(units, until_s + time.monotonic() - begun_s)

    @contextmanager
    def short():
        with monkeypatch.context() as patched:
            patched.setattr(writer, "WAIT_S", 0.1)
            patched.setattr(writer, "wait_committed", wait)
            patched.setattr(idempotency, "MAX_WAIT_S", 0.2)
            yield

    return short


@pytest.fixture
def threads(disk):
    with ThreadPoolExecutor(4) as threads:
        yield threads
        disk.answers.set()


def accepted(job):
    return StoredResponse(
        {"id": job}, [submitted(Job(job, job, "run", (Candidate(("cpu",)),), submitted_s=1.0), {}, 1.0)]
    )


def test_what_waits_behind_a_write_that_does_not_end_is_refused_and_never_stored(store, disk, threads, impatient):
    blocked = threads.submit(store._writer.submit, UnitOfWork(action=disk))
    assert disk.reached.wait(LIMIT_S)
    with impatient(), pytest.raises(StoreBusy, match=r"has not finished earlier writes after 0 s; nothing was stored"):
        store.append([Event("j", "started", 1, 1.0, {})])
    assert store.state().error.startswith("a write has not ended for ")
    disk.answers.set()
    blocked.result(LIMIT_S)
    store.append([Event("k", "started", 1, 1.0, {})])
    assert [e.job for e in store.read(0)] == ["k"]


def test_a_request_whose_write_does_not_end_may_be_asked_again_and_has_one_effect(store, disk, impatient):
    with impatient():
        (told,) = store.idempotent_each([IdempotentRequest("key", "digest", lambda: accepted("j"))], disk)
        assert isinstance(told, CommitPending) and "it may be stored" in str(told)
        with pytest.raises(CommitPending, match="with the same key: the request then counts once"):
            store.idempotent("key", "digest", lambda: accepted("k"), disk)
    disk.answers.set()
    assert store.idempotent("key", "digest", lambda: accepted("l")) == {"id": "j"}
    assert [e.job for e in store.read(0)] == ["j"]


def test_a_key_that_is_in_use_for_long_does_not_refuse_other_requests_of_a_batch(store, threads, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go_on.wait(LIMIT_S)
        return StoredResponse({"id": "slow"})

    first = threads.submit(store.idempotent, "key", "digest", slow)
    assert begun.wait(LIMIT_S)
    monkeypatch.setattr(idempotency, "MAX_WAIT_S", 0.2)
    batch = [IdempotentRequest(key, "digest", lambda: StoredResponse({"id": "new"})) for key in ("key", "other")]
    refused, stored = store.idempotent_each(batch)
    assert isinstance(refused, CommitPending) and "has not ended after" in str(refused)
    assert stored == {"id": "new"}
    monkeypatch.setattr(idempotency, "MAX_WAIT_S", LIMIT_S)
    go_on.set()
    assert first.result(LIMIT_S) == {"id": "slow"}
    assert store.idempotent("key", "digest", slow) == {"id": "slow"}


def test_whoever_has_to_know_waits_until_it_is_known(store, disk, threads, impatient):
    """The controller: with an error in place of an answer it would do the same thing again."""
    with impatient():
        told = threads.submit(store._writer.submit, UnitOfWork(action=disk))
        assert disk.reached.wait(LIMIT_S)
        with pytest.raises(TimeoutError):
            told.result(0.5)
    disk.answers.set()
    assert told.result(LIMIT_S) is None


def test_a_store_is_closed_in_time_although_a_write_does_not_end(open_store, disk, threads, monkeypatch, caplog):
    monkeypatch.setattr(writer, "CLOSE_S", 0.2)
    store = open_store()
    blocked = threads.submit(store._writer.submit, UnitOfWork(action=disk))
    assert disk.reached.wait(LIMIT_S)
    store.close()
    assert "does not end; this process exits without waiting for it" in caplog.text
    disk.answers.set()
    blocked.result(LIMIT_S)
    monkeypatch.setattr(writer, "CLOSE_S", LIMIT_S)
    store.close()
