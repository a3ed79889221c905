"""A job store with its jobs, and real services on the recorded nodes of one fleet."""

import pytest

from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.services.service import Service
from orchestrator.store.events.event_store import EventStore


@pytest.fixture
def store(tmp_path):
    store = EventStore(f"sqlite:///{tmp_path / 'jobs.db'}")
    yield store
    store.close()


@pytest.fixture
def jobs(store):
    return Jobs(store)


@pytest.fixture
def servers(tmp_path, recorded, monkeypatch):
    """`start(folder)`: a server with the job store in that folder; all are of one fleet. (start, the fleet)"""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("POLYFLEET_HOME", str(home))
    fleet, services = recorded.RecordedFleet(home, monkeypatch), []
    fleet.up()

    def start(folder="home"):
        (tmp_path / folder).mkdir(mode=0o700, exist_ok=True)
        services.append(Service(tmp_path / folder))
        return services[-1]

    yield start, fleet
    for service in services:
        service.close()
    for service in services:
        fleet.close(service)
