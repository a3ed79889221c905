"""Clients that end, connections that break within a request, and requests that come twice: each has one effect."""

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from faults import ROOT, until

from cluster.errors import FleetError
from orchestrator.client import client
from orchestrator.home import server_record, token

# Of connections that were aborted as the network's loop ended.
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.filterwarnings("ignore:.*StreamWriter.__del__.*:pytest.PytestUnraisableExceptionWarning"),
]
JOBS = 20


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


net = load(ROOT / "tests" / "orchestrator" / "server" / "bad_network.py")


@contextmanager
def network(now, faults):
    """Between clients and the server: connection n has the fault `faults(n)`."""
    socket = Path(server_record.read(now.fleet.home).socket)
    with net.Network(now.folder / "net", socket, faults).up() as there:
        yield there


def submit_through(now, there, marks, numbers):
    """Each from a client of its own."""
    for number in numbers:
        with client.Client(there.address, token.read(now.fleet.home)) as asked:
            job = asked.jobs.submit(spec(number, marks), key=f"{now.folder}-{number}")["id"]
        now.expected[job] = "SUCCEEDED"


def spec(number, marks):
    return {"task": "run", "command": f"echo {number} >> {marks}", "resources": {"pool": "left"}}


def done_once(now, marks, numbers):
    """Every command ran, and no one twice."""
    now.end.touch()
    for job in now.expected:
        until(lambda job=job: now.view(job)["state"] == "SUCCEEDED")
    assert sorted(map(int, marks.read_text().split())) == sorted(numbers)


def test_followers_that_are_killed_change_nothing(case, fleet, seed):
    with case("F7", "kill -9 of a client that follows a log", seed) as now:
        job = now.run(f"while [ ! -e {now.end} ]; do echo lives; sleep 0.1; done", resources={"node": "left-0"})
        training = now.single()
        words = [Path(sys.executable).with_name("polyfleet"), "logs", "-f", job]
        follower = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert follower.stdout.readline(), "it follows"
        now.inject(follower.kill)
        with follower:
            assert follower.wait() == -9
        now.told(training)
        assert (training.epoch, now.view(job)["attempt"], now.view(training.id)["interruptions"]) == (1, 1, 0)


def test_connections_that_break_at_any_byte_have_one_effect(case, fleet, seed):
    with case("F12", "connections break at a random byte of request or answer, or are reset", seed) as now:
        training, marks = now.single(), now.folder / "marks"

        def fault(number):
            ways = ("cut_request_at", "cut_answer_at", "half_closed_at")
            if number % 2:  # of two tries one arrives
                return net.Fault(delay_s=now.random.uniform(0.0, 0.1))
            way = now.random.choice(ways)
            at = now.random.randrange(0, 500 if way != "cut_answer_at" else 120)
            return net.Fault(**{way: at}, reset=now.random.random() < 0.3)

        with network(now, fault) as there:
            now.inject(lambda: None)
            submit_through(now, there, marks, range(JOBS))
            now.record["injected"] = there.broken
            assert there.broken >= JOBS // 4
        now.told(training)
        done_once(now, marks, range(JOBS))


def test_requests_that_come_twice_or_sixteen_times_at_once_have_one_effect(case, fleet, seed):
    what = "every request comes twice; 16 clients with one key; a job is submitted and cancelled by several at once"
    with case("F21", what, seed) as now:
        marks = now.folder / "marks"
        with network(now, lambda _: net.Fault(doubled=True)) as there:
            now.inject(lambda: None)
            submit_through(now, there, marks, range(JOBS))
            now.record["injected"] = there.doubled
            assert there.doubled >= JOBS
        with ThreadPoolExecutor(16) as threads:
            ids = set(threads.map(lambda _: once(fleet, spec(JOBS, marks), f"{now.folder}-same"), range(16)))
        assert len(ids) == 1
        now.expected[ids.pop()] = "SUCCEEDED"
        ends = [cancelled_at_once(fleet, f"{now.folder}-gone-{number}") for number in range(5)]
        done_once(now, marks, range(JOBS + 1))
        now.expected |= dict.fromkeys(ends, "CANCELLED")


def once(fleet, wanted, key):
    with client.connect() as asked:
        return asked.jobs.submit(wanted, key=key)["id"]


def cancelled_at_once(fleet, key):
    """Submitted by two clients and cancelled by two more, all at a time: it ends cancelled."""
    with client.connect() as asked, ThreadPoolExecutor(4) as threads:
        job = asked.jobs.submit({"task": "run", "command": "sleep 60", "resources": {"pool": "left"}}, key=key)["id"]
        again = threads.submit(once, fleet, {"task": "run", "command": "sleep 60", "resources": {"pool": "left"}}, key)
        for one in [threads.submit(asked.jobs.cancel, job) for _ in range(2)]:
            with suppress(FleetError):
                one.result()
        assert again.result() == job
    return job
