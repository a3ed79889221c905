import fcntl
import os
import tempfile
import threading
from pathlib import Path

import pytest
from sqlalchemy import MetaData, create_engine

from orchestrator.store import EventStore

POSTGRES = os.environ.get("POLYFLEET_TEST_POSTGRES", "")


@pytest.fixture
def sqlite_url(tmp_path):
    return f"sqlite:///{tmp_path / 'polyfleet.db'}"


@pytest.fixture(params=["sqlite", "postgresql"] if POSTGRES else ["sqlite"])
def url(request):
    """The URL of an empty store, of each kind that can be had here."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def postgresql_url():
    """POLYFLEET_TEST_POSTGRES names a database that these tests may empty; one test at a time has it."""
    if not POSTGRES:
        pytest.skip("POLYFLEET_TEST_POSTGRES names no database, e.g. postgresql+psycopg://user@host/name")
    engine = create_engine(POSTGRES)
    found = MetaData()
    with (Path(tempfile.gettempdir()) / "polyfleet-tests-postgres.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found.reflect(engine)
        found.drop_all(engine)
        engine.dispose()
        yield POSTGRES


@pytest.fixture
def open_store(url):
    """Open the store under test, as often as wanted; what is still open at the end is closed."""
    stores = []

    def opened(where=url):
        stores.append(EventStore(where))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


@pytest.fixture
def store(open_store):
    return open_store()


@pytest.fixture
def together():
    """Call each function in a thread of its own, all at once; their results in order, or the first error."""

    def run(*functions):
        barrier, results, errors = threading.Barrier(len(functions)), {}, []

        def call(number, function):
            barrier.wait(20)
            try:
                results[number] = function()
            except Exception as e:
                errors.append(e)

        threads = [threading.Thread(target=call, args=pair) for pair in enumerate(functions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        return [results[number] for number in range(len(functions))]

    return run
