"""While the controller or the job store is stuck, whoever asks for something is told so within seconds, over HTTP."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import LIMIT_S

from cluster.fleet import fleet_record
from orchestrator.store.events import writer
from orchestrator.store.events.unit_of_work import UnitOfWork
from orchestrator.verbs import jobs


@pytest.fixture
def stuck(live, monkeypatch):
    """The controller's thread does not come back from reading the fleet's record until this event is set."""
    go_on, read, reached = threading.Event(), fleet_record.read, threading.Event()

    def slow():
        if threading.current_thread().name == "controller" and not go_on.is_set():
            reached.set()
            assert go_on.wait(LIMIT_S)
        return read()

    monkeypatch.setattr(fleet_record, "read", slow)
    assert reached.wait(LIMIT_S)
    yield go_on
    go_on.set()


@pytest.fixture
def running(live, wait_for):
    """The id of a job that runs on cpu."""
    job = live.service.submissions.submit({"task": "run", "name": "sleeps", "command": ["sleep", "600"]})["id"]
    wait_for(lambda: jobs.show(live.hub, job)["state"] == "RUNNING")
    return job


def asked(live, path, body):
    with live.http as client:
        return client.post(path, json=body)


def test_what_a_stuck_controller_is_asked_for_is_refused_in_time_and_works_afterwards(live, running, stuck, wait_for):
    waiting = live.service.submissions.submit({"task": "run", "name": "waits", "command": ["true"]})["id"]
    orders = [
        (f"/v1/jobs/{waiting}/cancel", {}),
        (f"/v1/jobs/{running}/migrate", {"to": "xla"}),
        ("/v1/nodes/ipex-0/drain", {"reason": "new fans"}),
    ]
    with ThreadPoolExecutor(len(orders)) as threads:
        told = list(threads.map(lambda order: asked(live, *order), orders))
    for answer in told:
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
        error = answer.json()["error"]
        assert error["type"] == "ControllerBusy" and error["message"].endswith(
            "within 5 s: it is reading the fleet's record"
        )
    stuck.set()
    cancelled, migrated, drained = [asked(live, *order) for order in orders]
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "CANCELLED")
    assert (drained.status_code, drained.json()["state"]) == (200, "drained")
    assert migrated.status_code == 200 or "already runs on" in migrated.json()["error"]["message"]
    wait_for(lambda: (job := jobs.show(live.hub, running))["pool"] == "xla" and job["state"] == "RUNNING")
    told = [event["event"] for event in jobs.history(live.hub, running)]
    assert told.count("placed") == 2, "asked for twice, it was moved once"
    assert [e["event"] for e in jobs.history(live.hub, waiting)].count("cancelled") == 1


def test_while_a_write_of_the_job_store_does_not_end_requests_are_refused_with_what_is_waited_for(
    live, running, monkeypatch
):
    monkeypatch.setattr(writer, "WAIT_S", 0.2)
    answers, reached = threading.Event(), threading.Event()

    def disk(_):
        reached.set()
        assert answers.wait(LIMIT_S)

    spec = {"spec": {"task": "run", "name": "j", "command": ["true"]}}
    with ThreadPoolExecutor(2) as threads:
        write = threads.submit(live.service.store._writer.submit, UnitOfWork(action=disk))
        assert reached.wait(LIMIT_S)
        stopped = threads.submit(asked, live, f"/v1/jobs/{running}/cancel", {})
        with live.http as client:
            refused = client.post("/v1/jobs", json=spec, headers={"Idempotency-Key": "k"})
            busy = stopped.result(LIMIT_S)
            answers.set()
            write.result(LIMIT_S)
            monkeypatch.setattr(writer, "WAIT_S", LIMIT_S)
            again = client.post("/v1/jobs", json=spec, headers={"Idempotency-Key": "k"})
        cancelled = asked(live, f"/v1/jobs/{running}/cancel", {})
    for answer in (refused, busy):
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        assert "has not finished earlier writes" in answer.json()["error"]["message"]
    assert again.status_code == 201 and len(live.specs) == 2
    assert cancelled.json()["state"] == "CANCELLED"
