"""What only PostgreSQL can show. With POLYFLEET_TEST_POSTGRES set, test_events.py runs on it too."""

import pytest

from cluster.errors import FleetError
from orchestrator.core.model import Event
from orchestrator.store import EventStore

EVENT = Event("j", "started", 1, 1.0)


@pytest.fixture
def url(postgresql_url):
    return postgresql_url


def test_a_second_server_takes_over_and_the_first_can_write_no_more(open_store):
    first = open_store()
    first.append([EVENT])
    second = open_store()
    assert second.append([EVENT]) == [2]
    for _ in range(2):
        with pytest.raises(FleetError, match="another server has taken over"):
            first.append([EVENT])
    assert second.append([EVENT]) == [3]
    assert [e.seq for e in second.read(0)] == [1, 2, 3]


def test_no_error_shows_the_password(url):

    with pytest.raises(FleetError) as raised:
        EventStore("postgresql+psycopg://nobody:hunter2@127.0.0.1:1/none")
    assert "hunter2" not in str(raised.value)
