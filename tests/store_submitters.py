"""Submissions to a store by several threads, and what must be stored of them."""

import threading

from patience import LIMIT_S

from cluster.errors import FleetError
from orchestrator.core.jobs.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.store.events.idempotency import StoredResponse


def life(key):
    """Two events that count, of a job of its own."""
    return [submitted(Job(key, "j", "run", (Candidate(("cpu",)),)), {}, 1.0), Event(key, "cancelled", 0, 1.0)]


class Submitters:
    """Threads that submit with a key each, until told to stop: what was acknowledged, what was refused."""

    def __init__(self, store, threads=4):
        self.acked, self.refused, self._stop = [], [], threading.Event()
        self._threads = [threading.Thread(target=self._submit, args=(store, n)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def _submit(self, store, thread):
        number = 0
        while not self._stop.is_set():
            key, number = f"{thread}-{number}", number + 1
            try:
                store.idempotent(key, "digest", lambda key=key: StoredResponse({"id": key}, life(key)))
                self.acked.append(key)
            except FleetError as e:
                self.refused.append((key, str(e)))

    def ended(self):
        self._stop.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
        return self


def check_stored(store, acked, refused=()):
    """Each acknowledged submission is there once, whole and in order, none that was refused."""
    events = store.read(0)
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    assert [(e.job, e.event) for e in events[1::2]] == [(e.job, "cancelled") for e in events[::2]]
    jobs = [e.job for e in events[::2]]
    assert len(set(jobs)) == len(jobs)
    assert set(jobs) == set(acked)
    assert not set(jobs) & {key for key, _ in refused}
    assert store.differences() == []
