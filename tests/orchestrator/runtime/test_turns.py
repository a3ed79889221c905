"""Turns of the controller's thread that meet what nobody foresaw: what was acknowledged is done all the same."""

import errno
import os
import threading

import pytest
from patience import LIMIT_S

from cluster.errors import FleetError
from cluster.fleet import fleet_record
from cluster.nodes import connect
from orchestrator.core.controller import messages as m
from orchestrator.core.model import Event
from orchestrator.runtime.agents import actors, reservations
from orchestrator.runtime.clock import now
from orchestrator.runtime.controller.pending_request import PendingRequest
from orchestrator.runtime.controller.step_batch import StepBatch
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.store.events import database_setting
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.rows.job_cache import JobCache

TRUE = {"task": "run", "name": "j", "command": ["true"], "resources": {"pool": "cpu"}}


def failing(call, when, code):
    """`call`, which raises OSError once: where the controller's thread makes it and `when()`."""
    failed = threading.Event()

    def maybe(*arguments):
        if threading.current_thread().name == "controller" and not failed.is_set() and when():
            failed.set()
            raise OSError(code, os.strerror(code))
        return call(*arguments)

    maybe.failed = failed
    return maybe


def test_a_job_is_run_whose_submission_was_told_in_a_turn_that_could_not_read_the_record(live, monkeypatch):
    runtime = live.service.runtime

    def told():
        return any(isinstance(item, m.Submitted) and item.records for item in runtime._inbox.pending)

    monkeypatch.setattr(fleet_record, "read", failing(fleet_record.read, told, errno.EMFILE))
    live.ran(TRUE)
    assert fleet_record.read.failed.is_set()


def test_a_job_is_run_whose_submission_was_told_in_a_turn_that_failed(live, monkeypatch):
    """For a reason that nobody foresaw."""
    runtime = live.service.runtime

    def told():
        return any(isinstance(item, m.Submitted) and item.records for item in runtime._inbox.pending)

    monkeypatch.setattr(runtime, "_link", link := Failing(runtime._link, told))
    live.ran(TRUE)
    assert link.failed


class Failing:
    """The link, which raises once while `when()`."""

    def __init__(self, link, when):
        self._link, self._when, self.failed = link, when, False

    def __getattr__(self, name):
        return getattr(self._link, name)

    def update(self, *arguments):
        if not self.failed and self._when():
            self.failed = True
            raise ZeroDivisionError
        return self._link.update(*arguments)


def test_a_record_that_cannot_be_read_is_told_and_what_was_read_last_counts(live, monkeypatch, wait_for):
    """Nothing new is placed meanwhile; nodes are followed as ever."""
    runtime, path = live.service.runtime, fleet_record.path()
    written = path.read_text()
    path.write_text("{")
    wait_for(lambda: "is damaged" in runtime.hold_reason)
    heard_s = {node.name: node.last_contact_s for node in runtime.control.nodes.values()}
    wait_for(lambda: all(node.last_contact_s > heard_s[node.name] for node in runtime.control.nodes.values()))
    assert not runtime.problem and not runtime.liveness.error
    path.write_text(written)
    live.ran(TRUE)


def test_a_full_disk_at_the_first_join_keeps_no_job_waiting(servers, monkeypatch, wait_for):
    start, fleet = servers
    monkeypatch.setattr(
        database_setting, "write_private", failing(database_setting.write_private, lambda: True, errno.ENOSPC)
    )
    service = start()
    fleet.wait_until_known(service)
    assert database_setting.write_private.failed.is_set()
    job = service.submissions.submit(TRUE)["id"]
    wait_for(lambda: service.jobs_table.find(job).job.state == "SUCCEEDED")


def test_of_a_turn_only_what_cannot_be_stored_is_dropped(live_steps, caplog):
    """One that always fails stops no other, now or later."""
    steps, jobs, submit = live_steps
    bad, good = submit("bad"), submit("good")
    jobs.commit([Event(bad, "cancelled", 0, 1.0)])  # behind the controller's back: it cannot be cancelled once more
    asks = [PendingRequest(m.CancelRequested(bad, "user")), PendingRequest(m.CancelRequested(good, "user"))]
    items = [asks[0], m.Submitted(()), asks[1]]
    steps.apply(items)
    assert items == []
    assert jobs[good].job.state == "CANCELLED" and all(ask.done.is_set() for ask in asks)
    assert "internal error" in str(asks[0].error) and asks[1].error is None
    assert "is dropped" in caplog.text


def test_who_sees_that_a_job_has_changed_finds_the_controllers_state_changed(live_steps, monkeypatch):
    """Else it would find the devices of a job that has ended in use."""
    steps, jobs, submit = live_steps
    job, seen = submit("job"), []
    put = JobCache.put

    def visible_now(cache, records):
        seen.append((jobs[job].job.state, job in steps.control.records))
        put(cache, records)

    monkeypatch.setattr(JobCache, "put", visible_now)
    steps.apply([m.CancelRequested(job, "user")])
    assert seen == [("PENDING", False)]
    assert jobs[job].job.state == "CANCELLED"


@pytest.fixture
def live_steps(tmp_path):
    from orchestrator.core.jobs.fold import submitted
    from orchestrator.core.model import Candidate, Job
    from orchestrator.core.step import control

    store = EventStore(f"sqlite:///{tmp_path / 'jobs.db'}")
    jobs = Jobs(store)
    steps = StepBatch(jobs, control.control_from_log([], {}, {}, now()), lambda state: None)

    def submit(name):
        jobs.commit([submitted(Job(name, name, "run", (Candidate(("cpu",)),)), {}, 1.0)])
        steps.apply([m.Submitted((jobs[name],))])
        return name

    yield steps, jobs, submit
    store.close()


def leaving(fleet):
    from dataclasses import replace

    fleet_record.write(replace(fleet_record.read(), state="leaving"))


def left():
    return fleet_record.read().state == "left"


def test_a_cluster_is_left_once_its_attempts_were_told_while_turns_go_on(live, monkeypatch, wait_for, talking):
    service, told, held = live.service, [], threading.Event()
    monkeypatch.setattr(actors, "end_actor", lambda actor: told.append(f"ended {actor.agent.facts['node']}"))
    job = service.submissions.submit(talking.spec)["id"]
    wait_for(lambda: service.jobs_table.find(job).job.state == "RUNNING")
    node = service.job_views.view(service.jobs_table.find(job))["nodes"][0]
    agent = live.fleet.agent(node)
    stop = agent.stop

    def slowly(*arguments):
        held.wait(LIMIT_S)
        stop(*arguments)
        told.append(f"stopped on {node}")

    monkeypatch.setattr(agent, "stop", slowly)
    leaving(live.fleet)
    wait_for(lambda: service.runtime.problem.startswith("the fleet is leaving") or "leaving" in service.runtime.problem)
    other = service.submissions.submit(TRUE)["id"]
    service.runtime.post_and_wait(m.CancelRequested(other, "user"))  # it waits for a turn that ended
    assert not left() and told == []
    held.set()
    wait_for(left)
    assert told[0] == f"stopped on {node}" and f"ended {node}" in told


def test_a_head_that_does_not_tell_what_is_held_is_left_all_the_same(live, monkeypatch, wait_for):
    parted = []

    def held():
        raise FleetError("Ray gave no answer")

    monkeypatch.setattr(reservations, "list_reserved", held)
    monkeypatch.setattr(connect, "disconnect", lambda: parted.append(True))
    leaving(live.fleet)
    wait_for(left)
    assert parted == [True]
