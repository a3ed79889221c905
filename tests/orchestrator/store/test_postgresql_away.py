"""A PostgreSQL that is away, locked or hangs for seconds: what is refused then, and that all goes on afterwards."""

import time

import pytest
from store_submitters import Submitters, check_stored, life

from cluster.errors import FleetError
from orchestrator.core.model import Event
from orchestrator.store.events.idempotency import StoredResponse

pytestmark = pytest.mark.full

EVENT = Event("j", "started", 1, 1.0)


@pytest.fixture
def url(postgresql_url):
    return postgresql_url


@pytest.mark.usefixtures("patient_store")
def test_a_database_that_is_away_for_4_s_refuses_nothing(open_store, postgresql, url, wait_for, request):
    """Not those either that look for their key first, which is a read."""
    store = open_store()
    submitters = Submitters(store)
    request.addfinalizer(submitters.ended)
    wait_for(lambda: len(submitters.acked) > 50)
    postgresql.stop()
    time.sleep(4.0)
    postgresql.start()
    before = len(submitters.acked)
    wait_for(lambda: len(submitters.acked) > before + 50)
    done = submitters.ended()
    assert done.refused == []
    check_stored(store, done.acked)


def test_a_table_locked_by_another_program_is_an_error_after_seconds_and_then_goes_on(store, postgresql, url, together):
    import psycopg

    def refused(act):
        with pytest.raises(FleetError, match="is locked by another program"):
            act()

    store.append([EVENT])
    name, _, folder = url.partition("@/")[2].partition("?host=")
    with psycopg.connect(dbname=name, host=folder, user=postgresql.user) as other:
        other.execute("LOCK TABLE events")
        together(lambda: refused(lambda: store.append([EVENT])), lambda: refused(lambda: store.read(0)))
        other.rollback()
    assert store.append([EVENT]) == [2]
    assert len(store.read(0)) == 2


def test_a_database_server_that_hangs_is_an_error_within_seconds_and_then_goes_on(store, postgresql, together):
    acked, refused = [], set()

    def submit(key, with_key=True):
        try:
            store.idempotent(key if with_key else "", "digest", lambda: StoredResponse({"id": key}, life(key)))
            acked.append(key)
        except FleetError as e:
            assert any(word in str(e) for word in ("timeout", "connection", "has not finished earlier writes"))
            refused.add(key)

    submit("before")
    with postgresql.frozen():
        together(*[lambda n=n: submit(f"during-{n}", n % 2 == 0) for n in range(8)])
    assert refused == {f"during-{n}" for n in range(8)}
    submit("during-0")
    submit("after")
    assert acked == ["before", "during-0", "after"]
    check_stored(store, acked)
