"""What is submitted is checked against the devices seen last; known keys answer first; limits say when to come back."""

import json
import sqlite3
import threading

import pytest
from patience import LIMIT_S

from cluster.errors import Conflict, FleetError, SpecError, UserError
from orchestrator import limits
from orchestrator.client import client as http
from orchestrator.core.jobs.fold import apply, submitted
from orchestrator.limits import TooManyJobs
from orchestrator.runtime.health.last_inventory import LastInventory
from orchestrator.services.service import Service
from orchestrator.services.submissions import Submission
from orchestrator.services.views import accepted_view, acknowledged, job_view
from orchestrator.spec.job_spec import parse_job
from orchestrator.store.events import write_queue
from orchestrator.store.events.unit_of_work import make_metrics_row
from orchestrator.verbs import jobs

RUN = {"task": "run", "command": "true", "name": "hello"}
ON_TPU = {**RUN, "resources": {"accelerators": "tpu:emulated"}}
ON_V5P = {**RUN, "resources": {"accelerators": "tpu:v5p"}}


@pytest.fixture
def next_server(live):
    """The service of this home as the next server makes it, once `live` has ended; no fleet is up then."""
    made = []

    def start():
        live.fleet.down(live.service)
        live.service.close()
        made.append(Service(live.home))
        return made[0]

    yield start
    for service in made:
        service.close()


def test_the_next_server_knows_the_devices_seen_last_also_without_a_fleet(live, next_server):
    service = next_server()
    view = service.submissions.submit(ON_TPU)
    assert view["state"] == "PENDING"
    assert view["reason"].startswith("no fleet is up; the job waits, checked against the fleet of 20")
    with pytest.raises(SpecError, match="no pool has tpu:v5p; kinds here: cpu, cpu:ipex, tpu:emulated"):
        service.submissions.submit(ON_V5P)
    assert [record.job.id for record in service.jobs_table.page(()).records] == [view["id"]]


def test_a_project_that_the_fleet_does_not_have_is_refused_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    service = Service(tmp_path)
    assert service.submissions.submit({**RUN, "project": "visoin"})["state"] == "PENDING"  # no projects, no quotas
    monkeypatch.setattr(service.submissions, "_projects", lambda: {"vision"})
    with pytest.raises(SpecError, match="the fleet has no project 'visoin'; did you mean 'vision'") as raised:
        service.submissions.submit({**RUN, "project": "visoin"})
    assert raised.value.field == "project"
    assert service.submissions.submit({**RUN, "project": "vision"})["state"] == "PENDING"
    service.close()


def test_a_deadline_that_is_past_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    service = Service(tmp_path)
    with pytest.raises(SpecError, match="2020-01-01T00:00:00Z is in the past") as raised:
        service.submissions.submit({**RUN, "deadline": "2020-01-01T00:00:00Z"})
    assert raised.value.field == "deadline"
    service.close()


def test_where_no_fleet_was_ever_seen_everything_waits_with_words(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    service = Service(tmp_path)
    view = service.submissions.submit(ON_V5P)
    said = "no fleet is up; the job waits, and its resources are checked once a fleet is up"
    assert (view["state"], view["reason"]) == ("PENDING", said)
    service.close()


def test_an_inventory_that_cannot_be_read_is_none(tmp_path, caplog):
    for text in ("", "{", "[]", '{"seen_s": 1, "devices": [{"id": 1}]}', '{"devices": []}'):
        (tmp_path / "inventory.json").write_text(text)
        assert LastInventory(tmp_path / "inventory.json").newest is None
        assert "will be replaced when a fleet is up" in caplog.text
        caplog.clear()


def test_a_fleet_that_loses_a_node_is_still_known(live, wait_for):
    def known():
        path = live.home / "inventory.json"
        return [d["id"] for d in json.loads(path.read_text())["devices"]] if path.exists() else []

    devices = ["cpu-0/cpu", "ipex-0/cpu:ipex", "xla-0/tpu:emulated"]
    wait_for(lambda: known() == devices)
    live.fleet.lose(live.service, "xla-0")
    assert live.service.submissions.submit(ON_TPU)["state"] == "PENDING"
    assert known() == devices


def test_a_known_key_answers_before_anything_is_checked(live, next_server, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    body = {**ON_TPU, "secrets": {"TOKEN": "env:SECRET"}}
    first = live.service.submissions.submit(body, key="k")
    monkeypatch.delenv("SECRET")
    service = next_server()
    (live.home / "inventory.json").write_text(json.dumps({"seen_s": 1.0, "devices": []}))
    assert service.submissions.submit(body, key="k") == first
    assert service.submissions.submit(json.loads(json.dumps(body, sort_keys=True)), key="k") == first
    with pytest.raises(Conflict, match="was used with another request"):
        service.submissions.submit(ON_V5P, key="k")


def test_an_accepted_job_looks_as_its_view_does(live):
    job = parse_job(RUN).to_job("hello-1", 12.5)
    kept = json.loads(json.dumps(acknowledged(job, "")))
    record = apply(None, submitted(job, RUN, 12.5))
    assert accepted_view(kept) == job_view(record, {})


def test_too_many_waiting_jobs_are_refused_with_when_to_come_back(live, monkeypatch):
    monkeypatch.setattr(live.service.submissions, "_max_open", 3)
    live.fleet.hold(live.service)
    with live.http as client:
        for _ in range(3):
            assert client.post("/v1/jobs", json={"spec": RUN}).status_code == 201
        refused = client.post("/v1/jobs", json={"spec": RUN})
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "30")
    assert refused.json()["error"]["message"] == "3 jobs are waiting; the maximum is 3"
    assert len(live.specs) == 3


def test_a_store_that_takes_nothing_is_told_at_once_with_when_to_come_back(live):
    live.fleet.hold(live.service)
    with sqlite3.connect(live.home / "polyfleet.db", isolation_level=None) as other, live.http as client:
        other.execute("BEGIN IMMEDIATE")
        refused = client.post("/v1/jobs", json={"spec": RUN}, headers={"Idempotency-Key": "k"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "StoreUnavailable")
        assert int(refused.headers["Retry-After"]) > 0
        other.execute("ROLLBACK")
        assert client.post("/v1/jobs", json={"spec": RUN}, headers={"Idempotency-Key": "k"}).status_code == 201
    other.close()
    assert live.specs == [RUN]


@pytest.mark.parametrize(("text", "most"), [("", limits.MAX_WAITING_JOBS), ("7", 7), ("0", 0)])
def test_how_many_may_wait_is_a_setting(text, most):
    assert limits.max_waiting_jobs({limits.VARIABLE: text}) == most


@pytest.mark.parametrize("text", ["many", "-1", "1.5", "١"])
def test_a_setting_that_is_no_number_is_named(text):
    with pytest.raises(UserError, match=r"POLYFLEET_MAX_WAITING_JOBS=.* is not a number of jobs; write a number"):
        limits.max_waiting_jobs({limits.VARIABLE: text})


def test_errors_of_limits_survive_being_sent():
    error = TooManyJobs(5, 3)
    assert str(TooManyJobs(*error.args)) == str(error)


def test_jobs_are_listed_by_pages_with_chosen_fields(live):
    live.fleet.hold(live.service)
    with http.connect(start=False) as client:
        ids = [row["id"] for row in client.jobs.submit_many([{"spec": RUN}] * 25)["jobs"]]
        pages = list(client.jobs.list_pages(fields="state", limit=10))
    assert [[row["id"] for row in page] for page in pages] == [ids[15:], ids[5:15], ids[:5]]
    assert pages[0][0] == {"id": ids[15], "state": "PENDING"}
    with live.http as direct:
        first = direct.get("/v1/jobs", params={"limit": 10, "fields": "id,name"})
        assert first.json()[-1] == {"id": ids[-1], "name": "hello"}
        older = direct.get(first.links["next"]["url"])
        assert [row["id"] for row in older.json()] == ids[5:15]
        last = direct.get(older.links["next"]["url"])
        assert ([row["id"] for row in last.json()], last.links) == (ids[:5], {})
        assert direct.get("/v1/jobs", params={"since": 4e9}).json() == []
        wrong = direct.get("/v1/jobs", params={"fields": "sate"})
        assert (wrong.status_code, wrong.json()["error"]["field"]) == (422, "fields")


def test_a_list_asks_the_store_once_for_all_reports(live, monkeypatch):
    for number in range(3):
        job = live.ran({**RUN, "name": f"n{number}"})["id"]
        live.service.store.metrics.queue(make_metrics_row(job, 1, number, 1.0, {"step": number}))
    live.ran(RUN)
    live.service.jobs_table._metrics.clear()  # as in a server that has just started
    asked = []
    monkeypatch.setattr(live.service.store.metrics, "last", lambda job: asked.append(job))
    assert [job["metrics"] for job in jobs.list_(live.hub).rows] == [{"step": n} for n in range(3)] + [{}]
    assert asked == []


def test_bulk_is_all_or_nothing_and_limited(live):
    with http.connect(start=False) as client:
        with pytest.raises(SpecError) as wrong:
            client.jobs.submit_many([{"spec": RUN}, {"spec": ON_V5P}])
        assert wrong.value.field == "jobs.1.resources"
        with pytest.raises(SpecError, match="at most 1000 items"):
            client.jobs.submit_many([{"spec": RUN}] * 1001)
    assert live.specs == []


@pytest.mark.parametrize("verb", ["cancel", "migrate"])
def test_a_job_that_others_see_is_known_to_the_controller_although_its_request_is_not_answered_yet(
    live, monkeypatch, wait_for, verb
):
    """It is stored, and another of the same request is not: the store writes one after the other."""
    live.fleet.hold(live.service)
    writer = live.service.store._writer
    go_on, commit = threading.Event(), writer._commit

    def held_up(work, lines):
        if any(event.job.startswith("second") for unit in work for event in unit.events):
            go_on.wait(LIMIT_S)
        commit(work, lines)

    monkeypatch.setattr(write_queue, "MAX_GROUP_EVENTS", 1)
    monkeypatch.setattr(writer, "_commit", held_up)
    asked = [Submission(RUN | {"name": name}, "", "") for name in ("first", "second")]
    submitting = threading.Thread(target=live.service.submissions.submit_each, args=(asked,))
    submitting.start()
    try:
        wait_for(lambda: jobs.list_(live.hub).rows)
        asking = Asking(getattr(jobs, verb), live.hub, "first", *(["xla"] if verb == "migrate" else []))
        wait_for(lambda: len(writer._queue) or not asking.is_alive())  # what follows from it is to be stored
    finally:
        go_on.set()
        submitting.join()
    told = asking.answer()
    assert told["state"] == ("CANCELLED" if verb == "cancel" else "PENDING")
    wait_for(lambda: jobs.show(live.hub, "second")["state"] == "PENDING")
    assert jobs.show(live.hub, "first")["state"] == told["state"]


class Asking(threading.Thread):
    """A call in a thread of its own, which waits for the store."""

    def __init__(self, call, *arguments):
        super().__init__()
        self._call, self._arguments = call, arguments
        self.start()

    def run(self):
        try:
            self.told = self._call(*self._arguments)
        except Exception as e:
            self.told = e

    def answer(self):
        self.join(LIMIT_S)
        assert not isinstance(self.told, Exception), self.told
        return self.told


def test_where_the_stores_file_is_gone_nobody_is_told_to_come_back_later(tmp_path, monkeypatch):
    """Only a restart of the server helps: a client that asked again and again would wait for nothing."""
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    service = Service(tmp_path)
    (tmp_path / "polyfleet.db").unlink()
    with pytest.raises(FleetError, match="was removed or replaced") as e:
        service.submissions.submit(ON_V5P, key="a key")
    assert getattr(e.value, "retry_after_s", None) is None
    service.close()
