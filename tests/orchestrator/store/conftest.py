import subprocess
import threading
from pathlib import Path

import pytest
from patience import LIMIT_S

from orchestrator.store.database import database
from orchestrator.store.events import idempotency, writer
from orchestrator.store.events.event_store import EventStore


@pytest.fixture
def sqlite_url(tmp_path):
    return f"sqlite:///{tmp_path / 'polyfleet.db'}"


@pytest.fixture
def postgresql_url(postgresql):
    url = postgresql.url()
    yield url
    postgresql.give_back(url)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request):
    """The URL of an empty store, of each kind that can be had here."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def open_at():
    """Open the store of a URL, as often as wanted; what is still open at the end is closed."""
    stores = []

    def opened(where):
        stores.append(EventStore(where))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


@pytest.fixture
def open_store(url, open_at):
    """Open the store under test."""
    return lambda: open_at(url)


@pytest.fixture
def store(open_store):
    return open_store()


@pytest.fixture
def patient_store(monkeypatch):
    """A store restores lost connections, and lets writes wait, for as long as a test may wait."""
    limits = ((database, "RECONNECT_S"), (writer, "RECONNECT_S"), (writer, "WAIT_S"), (idempotency, "MAX_WAIT_S"))
    for module, name in limits:
        monkeypatch.setattr(module, name, LIMIT_S)


@pytest.fixture
def together():
    """Call each function in a thread of its own, all at once; their results in order, or the first error."""

    def run(*functions):
        barrier, results, errors = threading.Barrier(len(functions)), {}, []

        def call(number, function):
            barrier.wait(LIMIT_S)
            try:
                results[number] = function()
            except Exception as e:
                errors.append(e)

        threads = [threading.Thread(target=call, args=pair) for pair in enumerate(functions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        if errors:
            raise errors[0]
        return [results[number] for number in range(len(functions))]

    return run


@pytest.fixture
def kill_at(absent):
    """`kill_at(call, number, command)`: kill -9 as the process makes that system call for the number-th time. Whether
    it was killed; without strace there is nothing to see.
    """

    def run(call, number, command):
        inject = ["-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={number}"]
        words = ["strace", "-f", "-q", "-o", "/dev/null", *inject, *command]
        try:
            ran = subprocess.run(words, cwd=Path(__file__).parents[3], capture_output=True, check=False)
        except FileNotFoundError:
            absent("strace", "strace is not here")
        if ran.returncode not in (0, -9, 137):
            absent("strace", f"strace cannot act here: {ran.stderr.decode()[-200:]}")
        return ran.returncode != 0

    return run
