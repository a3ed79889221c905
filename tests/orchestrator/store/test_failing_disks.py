"""Processes really killed, disks really full: what was acknowledged is there, what was refused is not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.store.events import EventStore
from orchestrator.store.once import Answer

SUBMITTER = """
import os, sys, threading
from itertools import count
from orchestrator.core.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.store.events import EventStore
from orchestrator.store.once import Answer

store, round_, numbers = EventStore(sys.argv[1]), sys.argv[2], count()

def submit():
    for number in numbers:
        key = f"{round_}-{number}"
        os.write(1, f"asked {key}\\n".encode())
        job = Job(key, "j", "run", (Candidate(("cpu",)),))
        events = [submitted(job, {"command": "true"}, 1.0), Event(key, "cancelled", 0, 1.0)]
        store.once(key, "digest", lambda: Answer({"id": key}, events))
        os.write(1, f"acked {key}\\n".encode())

for _ in range(8):
    threading.Thread(target=submit, daemon=True).start()
threading.Event().wait()
"""

FILLER = """
import json, resource, sys
from cluster.errors import FleetError
from orchestrator.core.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.store.events import EventStore
from orchestrator.store.once import Answer

url, limit, ballast, with_keys = sys.argv[1], int(sys.argv[2]), sys.argv[3], len(sys.argv) > 4
store, acked, refused = EventStore(url), [], []

def append(number):
    job = Job(f"j{number}", "j", "run", (Candidate(("cpu",)),))
    events = [submitted(job, {"pad": "p" * 4000}, 1.0), Event(job.id, "cancelled", 0, 1.0)]
    try:
        if with_keys:
            store.once(f"key-{number}", "digest", lambda: Answer({}, events))
        else:
            store.append(events)
        acked.append(number)
    except FleetError as e:
        refused.append((number, str(e)))

if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for number in range(2000):
    append(number)
    if len(refused) == 5:
        break
full = len(acked)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
if ballast:
    open(ballast, "w").close()
for number in [number for number, _ in refused] + list(range(5000, 5005)):
    append(number)
stored = [[e.job, e.event] for e in store.read(0)]
seqs = [e.seq for e in store.read(0)]
differences = store.differences()
store.close()
told = {"acked": acked, "refused": refused, "full": full, "stored": stored, "seqs": seqs}
print(json.dumps(told | {"differences": differences}))
"""


def run_until_killed(url: str, round_: int, acks: int) -> tuple[list[str], list[str]]:
    """Keys that were asked for and those acknowledged, by a process killed after some acknowledgements."""
    child = subprocess.Popen([sys.executable, "-c", SUBMITTER, url, str(round_)], stdout=subprocess.PIPE, text=True)
    lines, seen = [], 0
    for line in child.stdout:
        lines.append(line)
        seen += line.startswith("acked")
        if seen >= acks:
            break
    os.kill(child.pid, signal.SIGKILL)
    lines += child.stdout.readlines()
    child.stdout.close()
    assert child.wait(120) == -signal.SIGKILL
    words = [line.split() for line in lines if line.endswith("\n")]
    return [key for word, key in words if word == "asked"], [key for word, key in words if word == "acked"]


def test_whatever_was_acknowledged_before_kill_9_is_there_once_and_can_be_asked_again(tmp_path):
    url = f"sqlite:///{tmp_path / 'polyfleet.db'}"
    asked, acked = [], []
    for round_, acks in enumerate((1, 7, 40, 200, 90)):
        more_asked, more_acked = run_until_killed(url, round_, acks)
        asked, acked = asked + more_asked, acked + more_acked
        store = EventStore(url)
        stored = [e.job for e in store.read(0) if e.event == "submitted"]
        assert set(acked) <= set(stored) <= set(asked)
        assert store.differences() == []
        assert {key for key in asked if store.jobs.get(key)} == set(stored)
        store.close()
    store = EventStore(url)
    for key in asked:
        assert store.once(key, "digest", lambda key=key: Answer({"id": key})) == {"id": key}
    events = store.read(0)
    store.close()
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    together = [(first.job, first.event, second.event) for first, second in zip(events[::2], events[1::2], strict=True)]
    assert sorted(together) == sorted((e.job, "submitted", "cancelled") for e in events if e.event == "submitted")
    assert len({job for job, _, _ in together}) == len(together)


@pytest.fixture
def injecting(absent):
    """`injecting(call, what)`: the words before a command whose system call is to be slow or to fail."""

    def words(call: str, what: str) -> list[str]:
        before = ["strace", "-f", "-q", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:{what}"]
        try:
            subprocess.run([*before, "true"], capture_output=True, check=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as e:
            absent("strace", f"strace cannot act here: {e}")
        return before

    return words


@pytest.mark.chaos
def test_a_slow_disk_makes_acknowledgements_late_but_none_of_them_untrue(tmp_path, injecting):
    """Each sync takes 0.3 s more; the process is killed by itself in the middle of one."""
    url = f"sqlite:///{tmp_path / 'polyfleet.db'}"
    dies = "acked_ = 0\n" + SUBMITTER.replace(
        'os.write(1, f"acked {key}\\n".encode())',
        'os.write(1, f"acked {key}\\n".encode()); globals().__setitem__("acked_", acked_ + 1); '
        "acked_ < 60 or os.kill(os.getpid(), 9)",
    )
    slow = injecting("fdatasync", "delay_enter=300000")
    ran = subprocess.run([*slow, sys.executable, "-c", dies, url, "0"], capture_output=True, text=True, check=False)
    words = [line.split() for line in ran.stdout.splitlines() if len(line.split()) == 2]
    acked, asked = ({key for word, key in words if word == wanted} for wanted in ("acked", "asked"))
    assert len(acked) >= 60, ran.stderr
    store = EventStore(url)
    stored = [e.job for e in store.read(0) if e.event == "submitted"]
    store.close()
    assert acked <= set(stored) <= asked and len(set(stored)) == len(stored)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("call", "error"),
    [("pwrite64", "ENOSPC"), ("pwrite64", "EIO"), ("pwrite64", "EDQUOT"), ("fdatasync", "ENOSPC"), ("fsync", "EIO")],
)
@pytest.mark.parametrize("first", [160, 190, 230])
def test_a_disk_that_fails_for_a_while_refuses_with_words_and_then_goes_on(tmp_path, injecting, call, error, first):
    url = f"sqlite:///{tmp_path / 'polyfleet.db'}"
    first -= 80 if call == "fdatasync" else 0  # one a commit, while pages are several
    failing = injecting(call, f"error={error}:when={first}..{first + 6}")
    command = [*failing, sys.executable, "-c", FILLER.replace("2000", "200"), url, "0", "", "keys"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert len(told["acked"]) > told["full"]  # some that were refused first
    assert told["stored"] == [[f"j{n}", name] for n in told["acked"] for name in ("submitted", "cancelled")]
    assert told["seqs"] == list(range(1, len(told["seqs"]) + 1))
    assert all("the job store" in why and url[10:] in why for _, why in told["refused"])
    assert told["refused"] or call == "fsync"
    store = EventStore(url)
    assert [[e.job, e.event] for e in store.read(0)] == told["stored"]
    store.close()


COMMITTER = """
import os, sys
from orchestrator.core.fold import submitted
from orchestrator.core.model import Candidate, Event, Job
from orchestrator.runtime.jobs import Jobs
from orchestrator.store.events import EventStore
from sqlalchemy import event

store, left = EventStore(sys.argv[1]), int(sys.argv[2])
jobs = Jobs(store)
placed = {"candidate": 0, "kind": "cpu", "pool": "cpu", "leases": [["cpu-0/cpu", [0]]], "reason": "fits"}

@event.listens_for(store._database._writer, "before_cursor_execute")
def counted(connection, cursor, statement, *_):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)

new = [Job(f"j{n}", "j", "run", (Candidate(("cpu",)),)) for n in range(3)]
jobs.commit([submitted(job, {}, 1.0) for job in new])
jobs.commit([e for j in new for e in (Event(j.id, "placed", 1, 2.0, placed), Event(j.id, "started", 1, 3.0))])
os.write(1, b"acked")
"""


@pytest.mark.parametrize("number", range(0, 11, 2))
def test_kill_9_before_any_statement_of_a_turn_leaves_all_of_it_or_nothing(tmp_path, number):
    url = f"sqlite:///{tmp_path / 'polyfleet.db'}"
    ran = subprocess.run([sys.executable, "-c", COMMITTER, url, str(number)], stdout=subprocess.PIPE, check=False)
    store = EventStore(url)
    assert ran.stdout == (b"acked" if ran.returncode == 0 else b"")
    assert store.last_seq in ((9,) if ran.stdout else (0, 3, 9)) and store.differences() == []
    assert {str(r.job.state) for r in store.jobs.open()} <= {"RUNNING" if store.last_seq == 9 else "PENDING"}
    store.close()


def check_filled(told: dict) -> None:
    """Everything acknowledged is stored, both its events, in order; what was refused is stored when asked again."""
    refused = [number for number, _ in told["refused"]]
    assert told["full"] > 0
    assert len(refused) == 5
    assert told["acked"][told["full"] :] == [*refused, *range(5000, 5005)]
    assert told["stored"] == [[f"j{n}", name] for n in told["acked"] for name in ("submitted", "cancelled")]
    assert told["seqs"] == list(range(1, len(told["seqs"]) + 1))
    assert told["differences"] == []
    for _, message in told["refused"]:
        assert "cannot be written" in message
        assert "MiB are free there" in message
        assert "free space on that disk: what was acknowledged is safe" in message


def test_a_file_that_may_not_grow_refuses_loses_nothing_and_goes_on_afterwards(tmp_path):
    url = f"sqlite:///{tmp_path / 'polyfleet.db'}"
    ran = subprocess.run(
        [sys.executable, "-c", FILLER, url, str(600_000), "", "keys"], capture_output=True, text=True, check=True
    )
    check_filled(json.loads(ran.stdout))


def in_a_small_disk(folder: Path, command: list[str], size: str) -> subprocess.CompletedProcess:
    script = (
        f'mount -t tmpfs -o size={size} none "$1" && head -c 1000000 /dev/zero > "$1/ballast" && shift && exec "$@"'
    )
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", str(folder), *command], capture_output=True, text=True, check=False
    )


def can_mount(folder: Path) -> str:
    try:
        ran = in_a_small_disk(folder, ["true"], "1m")
    except FileNotFoundError:
        return "unshare is not here"
    return "" if ran.returncode == 0 else f"cannot mount a small disk: {ran.stderr.strip()}"


def test_a_full_disk_refuses_loses_nothing_and_goes_on_when_there_is_room(tmp_path):
    if why := can_mount(tmp_path):
        pytest.skip(why)
    url, ballast = f"sqlite:///{tmp_path / 'polyfleet.db'}", str(tmp_path / "ballast")
    ran = in_a_small_disk(tmp_path, [sys.executable, "-c", FILLER, url, "0", ballast, "keys"], "3m")
    assert ran.returncode == 0, ran.stderr
    check_filled(json.loads(ran.stdout))


@pytest.mark.parametrize("keys", [(), ("keys",)])
def test_a_disk_that_fails_to_sync_is_not_believed(tmp_path, injecting, keys):
    """The write went through, its sync did not: told as an error, and taken out again before anything else goes in."""
    url = f"sqlite:///{tmp_path / 'polyfleet.db'}"
    failing = injecting("fdatasync", "error=EIO:when=40..44")
    command = [*failing, sys.executable, "-c", FILLER.replace("2000", "60"), url, "0", "", *keys]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(ran.stdout)
    refused = [number for number, _ in told["refused"]]
    assert 1 <= len(refused) <= 5
    assert told["differences"] == []
    assert told["stored"] == [[f"j{n}", name] for n in told["acked"] for name in ("submitted", "cancelled")]
    assert told["acked"][told["full"] :] == [*refused, *range(5000, 5005)]
