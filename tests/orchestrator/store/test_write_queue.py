"""What waits for the store's writer: the order and size of what it takes, and what happens to the rest."""

import pytest

from orchestrator.core.model import Event
from orchestrator.store.events import write_queue
from orchestrator.store.events.unit_of_work import UnitOfWork
from orchestrator.store.events.write_queue import MAX_GROUP_EVENTS, METRICS_PER_WRITE, WriteQueue


def unit(events=1):
    return UnitOfWork(events=[Event("j", "submitted", 0, 0.0, {})] * events)


@pytest.fixture
def queue():
    return WriteQueue()


def test_units_are_taken_in_their_order_until_a_transaction_has_enough_events(queue):
    units = [unit(MAX_GROUP_EVENTS - 1), unit(0), unit(3), unit()]
    assert queue.add(units) and len(queue) == 4
    assert queue.take() == (units[:2], []) and queue.take() == (units[2:], [])
    assert len(queue) == 0


def test_units_are_taken_with_all_metrics_that_were_added_before(queue, monkeypatch):
    monkeypatch.setattr(write_queue, "METRICS_PAUSE_S", 0.0)
    rows = [{"step": step} for step in range(METRICS_PER_WRITE + 2)]
    for row in rows:
        queue.add_metrics(row)
    assert queue.take() == ([], rows[:METRICS_PER_WRITE])
    for row in rows:
        queue.add_metrics(row)
    waiting = unit()
    queue.add([waiting])
    assert queue.take() == ([waiting], rows[METRICS_PER_WRITE:] + rows)


def test_the_oldest_metrics_are_dropped_if_too_many_wait(queue, monkeypatch):
    monkeypatch.setattr(write_queue, "MAX_METRICS_WAITING", 2)
    for step in range(3):
        queue.add_metrics({"step": step})
    queue.close()
    assert queue.metrics_dropped == 1 and queue.take() == ([], [{"step": 1}, {"step": 2}])


def test_only_units_that_still_wait_are_withdrawn(queue):
    taken, late, other = unit(MAX_GROUP_EVENTS), unit(), unit()
    queue.add([taken, late, other])
    assert queue.take() == ([taken], [])
    assert queue.withdraw([taken, late]) == [late]
    assert queue.take_units() == [other]


def test_a_closed_queue_accepts_nothing_and_is_emptied(queue):
    waiting = unit()
    queue.add([waiting])
    queue.close()
    assert not queue.add([unit()])
    assert queue.take() == ([waiting], []) and queue.take() is None
