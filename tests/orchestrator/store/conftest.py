import threading

import pytest

from orchestrator.store import EventStore


@pytest.fixture
def sqlite_url(tmp_path):
    return f"sqlite:///{tmp_path / 'polyfleet.db'}"


@pytest.fixture
def postgresql_url(postgresql):
    return postgresql.url()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request):
    """The URL of an empty store, of each kind that can be had here."""
    return request.getfixturevalue(f"{request.param}_url")


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
