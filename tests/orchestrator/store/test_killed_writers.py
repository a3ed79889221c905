"""Processes really killed: what was acknowledged is there, once, and can be asked again."""

import os
import signal
import subprocess
import sys

import pytest
from store_writers import COMMITTER, SUBMITTER

from orchestrator.store.events.event_store import EventStore
from orchestrator.store.events.idempotency import StoredResponse


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
    assert child.wait() == -signal.SIGKILL
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
        assert store.idempotent(key, "digest", lambda key=key: StoredResponse({"id": key})) == {"id": key}
    events = store.read(0)
    store.close()
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    together = [(first.job, first.event, second.event) for first, second in zip(events[::2], events[1::2], strict=True)]
    assert sorted(together) == sorted((e.job, "submitted", "cancelled") for e in events if e.event == "submitted")
    assert len({job for job, _, _ in together}) == len(together)


@pytest.mark.parametrize("number", range(0, 11, 2))
def test_kill_9_before_any_statement_of_a_turn_leaves_all_of_it_or_nothing(tmp_path, number):
    url = f"sqlite:///{tmp_path / 'polyfleet.db'}"
    ran = subprocess.run([sys.executable, "-c", COMMITTER, url, str(number)], stdout=subprocess.PIPE, check=False)
    store = EventStore(url)
    assert ran.stdout == (b"acked" if ran.returncode == 0 else b"")
    assert store.last_seq in ((9,) if ran.stdout else (0, 3, 9)) and store.differences() == []
    assert {str(r.job.state) for r in store.jobs.open()} <= {"RUNNING" if store.last_seq == 9 else "PENDING"}
    store.close()
