"""What a node reports and the store does not know: a real store, what an agent tells as plain data."""

import pytest

from orchestrator.core.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.runtime.agents import Agent, Agents
from orchestrator.runtime.follow import Follower
from orchestrator.runtime.jobs import Jobs
from orchestrator.runtime.leaks import Leak, kept_by_ended_jobs
from orchestrator.store import EventStore

PLACED = {"candidate": 0, "kind": "cpu", "pool": "cpu", "leases": [["cpu-0/cpu", [0]]], "reason": "fits"}


@pytest.fixture
def seen(tmp_path):
    """(agent, tell, dismissed, jobs) of a node, told of by reports as an agent makes them."""
    store = EventStore(f"sqlite:///{tmp_path / 'polyfleet.db'}")
    job = Job("known", "known", "run", (Candidate(("cpu",)),))
    store.append([submitted(job, {}, "", 1.0), Event("known", "placed", 1, 2.0, PLACED)])
    jobs = Jobs(store)
    agents, dismissed = Agents(lambda _: None), []
    agent = agents._by_node["cpu-0"] = Agent("id", None)
    follower = Follower(jobs, store, agents, {}, lambda _function, *told: dismissed.append(told))

    def tell(*reports):
        rows = [
            {"job": job, "epoch": epoch, "node_rank": 0, "phase": phase, "cursor": 7, "events": [], "outcome": None}
            for job, epoch, phase in reports
        ]
        keys = [f"{job}.{epoch}.0" for job, epoch, _ in reports]
        follower.heard("cpu-0", {"facts": None, "reports": rows, "attempts": keys})

    yield agent, tell, dismissed, jobs
    store.close()


def test_an_attempt_of_an_unknown_job_is_noted_and_not_stopped(seen):
    agent, tell, dismissed, _ = seen
    tell(("other", 3, "running"))
    assert agent.unknown == ["other.3.0"] and dismissed == []
    assert agent.strangers == {"other.3.0": (7, "running")}  # the next watch says so, and does not return at once
    tell(("other", 3, "ended"))
    assert agent.unknown == [] and dismissed == []
    tell()
    assert agent.strangers == {}


def test_an_attempt_newer_than_the_database_is_of_a_later_copy_of_it(seen):
    agent, tell, dismissed, _ = seen
    tell(("known", 2, "running"))
    assert agent.unknown == ["known.2.0"] and dismissed == []


def test_an_older_attempt_of_a_known_job_is_dismissed(seen):
    agent, tell, dismissed, _ = seen
    tell(("known", 1, "running"), ("known", 0, "ended"))
    assert agent.unknown == []
    assert dismissed == [("cpu-0", "known", 1, False), ("cpu-0", "known", 0, True)]


def test_a_damaged_job_is_known_and_its_attempts_are_stopped(seen):
    agent, tell, dismissed, jobs = seen
    jobs.damaged["known"] = "row 2 is damaged"
    tell(("known", 2, "running"))
    assert agent.unknown == [] and dismissed == [("cpu-0", "known", 2, False)]


def test_devices_that_an_ended_job_keeps_past_its_lease_are_a_leak(seen):
    *_, jobs = seen
    jobs.record(Event("known", "cancelled", 1, 100.0, {"reason": "by the user"}))
    assert kept_by_ended_jobs(jobs.all(), 125.0) == []
    reason = "the job is CANCELLED for 60 s, and its attempt still holds cpu-0/cpu [0]"
    assert kept_by_ended_jobs(jobs.all(), 160.0) == [Leak("known.1", reason)]
    jobs.record(Event("known", "released", 1, 161.0, {}))
    assert kept_by_ended_jobs(jobs.all(), 190.0) == []
