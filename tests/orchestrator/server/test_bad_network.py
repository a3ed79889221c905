"""Requests whose answers are lost, cut, doubled or late have one effect; so have many clients with one key."""

import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from patience import LIMIT_S

from cluster.errors import Conflict, NotFound
from orchestrator.client import client as http
from orchestrator.client.server_connection import ResponseLost
from orchestrator.client.transport import BrokenConnection
from orchestrator.code_archives.code_archive import SCRATCH_PREFIX
from orchestrator.verbs import fleet, jobs

# Of connections that were aborted as the network's loop ended.
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:.*StreamWriter.__del__.*:pytest.PytestUnraisableExceptionWarning"),
]
RUN = {"task": "run", "command": "true", "resources": {"pool": "xla"}}


def load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


net = load("bad_network")


@pytest.fixture
def network(live, tmp_path):
    """`network(faults)` is a client behind a network with these faults for its first connections, and none later."""
    held = []

    def make(*faults):
        there = net.Network(tmp_path / "net", live.socket, lambda n: faults[n] if n < len(faults) else net.NONE)
        up = there.up()
        held.append(up)
        up.__enter__()
        client = http.Client(there.address, live.token)
        held.append(client)
        return client

    yield make
    for one in reversed(held):
        one.__exit__(None, None, None)


@pytest.fixture
def waiting(live):
    """Jobs wait: what happens to them is what was asked of the server."""
    live.fleet.hold(live.service)
    return live


def names(live):
    return [spec["name"] for spec in live.specs]


def test_a_submission_cut_at_any_byte_counts_once(waiting, network):
    expected = []
    for number in range(0, 900, 45):
        for way in ("cut_request_at", "cut_answer_at", "half_closed_at"):
            name = f"{way.replace('_', '-')}-{number}"
            client = network(*[net.Fault(**{way: number})] * 2)
            view = client.jobs.submit({**RUN, "name": name}, key=name)
            assert (view["name"], view["state"]) == (name, "PENDING")
            expected.append(name)
    assert sorted(names(waiting)) == sorted(expected)


@pytest.mark.parametrize(
    "fault", [net.Fault(doubled=True), net.Fault(delay_s=0.05), net.Fault(cut_answer_at=0), net.Fault(reset=True)]
)
def test_every_verb_with_a_key_has_one_effect(live, network, fault, checkpoint):
    client = network(fault, fault)
    one = client.jobs.submit({**RUN, "name": "one"}, key="a")
    many = client.jobs.submit_many([{"spec": {**RUN, "name": f"many-{n}"}} for n in range(3)], key="b")
    run = client.benchmarks.start({"cases": ["mlp"], "pools": ["xla"]}, key="c")
    pinned = client.checkpoints.pin(checkpoint, key="d")
    with http.connect(start=False) as direct:
        assert direct.jobs.submit({**RUN, "name": "one"}, key="a") == one
        assert direct.jobs.submit_many([{"spec": {**RUN, "name": f"many-{n}"}} for n in range(3)], key="b") == many
        assert direct.benchmarks.start({"cases": ["mlp"], "pools": ["xla"]}, key="c")["run"] == run["run"]
        assert direct.checkpoints.pin(checkpoint, key="d") == pinned
        for other in (
            lambda: direct.jobs.submit({**RUN, "name": "two"}, key="a"),
            lambda: direct.jobs.submit_many([{"spec": {**RUN, "name": "many-0"}}], key="b"),
            lambda: direct.benchmarks.start({"cases": ["mlp"]}, key="c"),
            lambda: direct.checkpoints.pin(checkpoint, remove=True, key="d"),
        ):
            with pytest.raises(Conflict, match="was used with another request"):
                other()
        assert len(direct.benchmarks.list()) == 1
        direct.benchmarks.cancel(run["run"])
    assert sorted(names(live)) == sorted(["one", "many-0", "many-1", "many-2", f"{run['run']}-xla"])


@pytest.mark.parametrize("fault", [net.Fault(cut_answer_at=0), net.Fault(cut_answer_at=30)])
def test_what_only_reads_is_asked_again_on_another_connection(waiting, network, fault):
    assert network(fault).fleet.show()["name"]
    with pytest.raises(BrokenConnection):
        network(fault, fault).fleet.show()


def test_when_no_answer_ever_comes_the_key_is_told(waiting, network):
    client = network(*[net.Fault(cut_answer_at=20)] * 20)
    with pytest.raises(ResponseLost) as lost:
        client.jobs.submit({**RUN, "name": "lost"})
    assert lost.value.remedy.endswith(f"--key {lost.value.key}")
    with http.connect(start=False) as direct:
        assert direct.jobs.submit({**RUN, "name": "lost"}, key=lost.value.key)["name"] == "lost"
    assert names(waiting) == ["lost"]


def test_64_threads_with_one_key_make_one_job(waiting):
    start = threading.Barrier(64)

    def submit(_):
        with waiting.http as client:
            start.wait(LIMIT_S)
            return client.post("/v1/jobs", json={"spec": RUN}, headers={"Idempotency-Key": "k"}).content

    with ThreadPoolExecutor(64) as threads:
        answers = set(threads.map(submit, range(64)))
    assert len(answers) == 1
    assert len(waiting.specs) == 1


def test_a_cancel_that_races_its_submission_wins_or_finds_nothing(live, wait_for):
    def race(number):
        name = f"race-{number}"
        with http.connect(start=False) as client:
            told = threading.Thread(target=client.jobs.submit, args=({"command": "sleep 60", "name": name},))
            told.start()
            with http.connect(start=False) as other:
                for _ in range(200):
                    try:
                        other.jobs.cancel(name)
                        break
                    except NotFound:
                        continue
            told.join()
            if client.jobs.show(name)["state"] != "CANCELLED":
                client.jobs.cancel(name)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(race, range(12)))
    views = jobs.list_(live.hub).rows
    assert [view["state"] for view in views] == ["CANCELLED"] * 12
    wait_for(lambda: all(pool["free"] == pool["devices"] for pool in fleet.show(live.hub)["pools"]))


@pytest.mark.parametrize("after_s", [0.3, 0.6, 0.7, 0.8, 1.0])
def test_a_client_killed_at_any_time_leaves_nothing_behind(waiting, start, tmp_path, monkeypatch, wait_for, after_s):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "data").write_bytes(os.urandom(30 << 20))
    words = ["submit", "--task", "run", "--key", "k", "--working-dir", str(tmp_path / "code"), "--", "true"]
    child = start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(after_s)
        raise subprocess.TimeoutExpired(words, after_s)  # it was quicker
    child.send_signal(signal.SIGKILL)
    child.wait()
    wait_for(lambda: not list((waiting.home / "packages").glob(".incoming-*")))
    assert len(waiting.specs) in (0, 1)
    again = start(*words, stdout=subprocess.PIPE)
    assert again.communicate()[0]
    assert len(waiting.specs) == 1
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert list((tmp_path / "tmp").glob(f"{SCRATCH_PREFIX}*")) == []


def test_a_request_refused_for_the_moment_is_sent_again_a_few_times(live, monkeypatch):
    monkeypatch.setattr("orchestrator.server.guard.MAX_CONCURRENT_REQUESTS", 0)
    told = []
    with http.Client(live.address, live.token, live.home, told.append) as client:

        def pause(pause_s, error):
            told.append((pause_s, type(error).__name__))
            if len(told) == 2:
                monkeypatch.setattr("orchestrator.server.guard.MAX_CONCURRENT_REQUESTS", 100)

        monkeypatch.setattr(client, "_pause", pause)
        assert client.jobs.list() == []
    assert told == [(1.0, "FleetError")] * 2


def test_one_request_too_many_is_refused_at_once_with_when_to_come_back(live, monkeypatch):
    monkeypatch.setattr("orchestrator.server.guard.MAX_CONCURRENT_REQUESTS", 1)
    asked, go_on = threading.Event(), threading.Event()

    def slow():
        asked.set()
        assert go_on.wait(LIMIT_S)
        return []

    monkeypatch.setattr(live.service.readiness, "wait_until_ready", slow)
    with ThreadPoolExecutor(1) as thread, live.http as client:
        first = thread.submit(lambda: httpx.get(f"{live.url}/v1/doctor", headers=client.headers, trust_env=False))
        assert asked.wait(LIMIT_S)
        refused = client.get("/v1/jobs")
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert refused.json()["error"]["message"] == "the server is processing its maximum of 1 requests"
        assert client.get("/healthz").status_code == 200
        go_on.set()
        assert first.result().status_code == 200
        assert client.get("/v1/jobs").status_code == 200


def test_a_follower_that_is_refused_for_the_moment_goes_on(live, monkeypatch):
    limit = "orchestrator.server.http.streams.MAX_STREAMS"
    live.service.submissions.submit(RUN)
    monkeypatch.setattr(limit, 0)
    told = []
    with http.Client(live.address, live.token, live.home, told.append) as client:

        def pause(pause_s, error):
            told.append(pause_s)
            if len(told) == 2:
                monkeypatch.setattr(limit, 100)

        monkeypatch.setattr(client, "_pause", pause)
        assert next(client.changes.follow())["event"] == "submitted"
    assert len(told) == 2


def test_an_upload_that_is_refused_for_the_moment_is_sent_again_from_its_start(live, monkeypatch, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as made:
        made.writestr("data", os.urandom(200_000))
    sha = hashlib.sha256((tmp_path / "a.zip").read_bytes()).hexdigest()
    with http.Client(live.address, live.token, live.home) as client:
        sent, pauses = client._request, []

        def request(method, path, **options):
            if method == "PUT" and not pauses:
                monkeypatch.setattr("orchestrator.server.guard.MAX_CONCURRENT_REQUESTS", 0)
            return sent(method, path, **options)

        def pause(pause_s, error):
            pauses.append(pause_s)
            monkeypatch.setattr("orchestrator.server.guard.MAX_CONCURRENT_REQUESTS", 100)

        monkeypatch.setattr(client, "_request", request)
        monkeypatch.setattr(client, "_pause", pause)
        client.upload_code_archive(sha, tmp_path / "a.zip")
    assert (live.service.code_archives.is_stored(sha), pauses) == (True, [1.0])
