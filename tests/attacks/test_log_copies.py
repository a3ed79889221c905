"""Logs of nodes that may be given back, as the server keeps and reads them."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import wait_for

sys.path.insert(0, str(Path(__file__).parent))

from log_readers import Direct, Node, lines, reader, record

from cluster.errors import FleetError
from orchestrator.core.controller.commands import RemoveFiles
from orchestrator.runtime.jobs import log_copies
from orchestrator.runtime.jobs.log_copies import LogCopies
from orchestrator.runtime.jobs.log_preservation import TRIES, LogPreservation


@pytest.fixture
def node(tmp_path):
    it = Node(tmp_path)
    yield it
    it.close()


@pytest.fixture
def agents(node):
    return Direct(n0=node.attempts)


def ran(node, *words, epoch=1):
    node.start(command=words, epoch=epoch)
    assert node.outcome(epoch=epoch)["state"] == "succeeded"


def test_a_kept_log_reads_as_on_its_node_which_is_asked_no_more(node, agents, tmp_path):
    ran(node, "sh", "-c", "seq 100000; echo said >&2")
    there = lines(reader(agents), record())
    LogCopies(tmp_path / "kept", agents).copy("j", 1, 0, "n0")
    agents.asked.clear()
    logs = reader(agents, tmp_path / "kept")
    assert lines(logs, record(), limit_bytes=100_000) == there and len(there) == 100_001
    last = logs.tail(record(), None, None, 3)
    assert last["lines"] == there[-3:] and lines(logs, record(), cursor=last["cursor"]) == []
    assert not agents.asked and logs.unread_notes(record(), None, None) == []


def test_of_a_long_log_the_beginning_and_the_end_are_kept_and_the_gap_is_told(node, agents, tmp_path, monkeypatch):
    monkeypatch.setattr(log_copies, "MAX_LOG_BYTES", 100_000)
    monkeypatch.setattr(log_copies, "FIRST_BYTES", 20_000)
    monkeypatch.setattr(log_copies, "PAGE_BYTES", 7_000)
    ran(node, "seq", "20000")
    LogCopies(tmp_path / "kept", agents).copy("j", 1, 0, "n0")
    texts = [line["text"] for line in lines(reader(agents, tmp_path / "kept"), record())]
    [gap] = [i for i, text in enumerate(texts) if "bytes are left out here" in text]
    first, end = int(texts[gap - 1]), int(texts[gap + 1])
    assert texts[:gap] == [str(n) for n in range(1, first + 1)]
    assert texts[gap + 1 :] == [str(n) for n in range(end, 20_001)]
    kept_bytes = sum(path.stat().st_size for path in (tmp_path / "kept").rglob("log*"))
    assert 80_000 < kept_bytes < 120_000


def test_a_gap_in_the_log_of_the_node_is_told_by_the_copy(node, agents, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_LOG_LIMIT_BYTES", str(1 << 20))
    ran(node, "seq", "60000")
    there = lines(reader(agents), record())
    assert any("bytes are left out here" in line["text"] for line in there)
    LogCopies(tmp_path / "kept", agents).copy("j", 1, 0, "n0")
    assert lines(reader(agents, tmp_path / "kept"), record()) == there


def test_logs_of_jobs_that_were_removed_go(node, agents, tmp_path):
    ran(node, "true")
    kept = LogCopies(tmp_path / "kept", agents)
    kept.copy("j", 1, 0, "n0")
    kept.remove_stale(lambda job: job == "j")
    assert kept.is_copied("j", 1, 0)
    kept.remove_stale(lambda job: False)
    assert not kept.is_copied("j", 1, 0) and list((tmp_path / "kept").iterdir()) == []


class Fleet:
    """Nodes of pools, as the server sees them."""

    def get(self, name):
        return SimpleNamespace(facts=SimpleNamespace(pool="grown" if name == "n0" else "stays"))


class Failing:
    """Keeps nothing so many times."""

    def __init__(self, times):
        self.times, self.asked = times, 0

    def copy(self, *_):
        self.asked += 1
        if self.asked <= self.times:
            raise FleetError("node n0 does not answer", "ask again")


@pytest.mark.parametrize(("node", "fails", "asked"), [("n0", 0, 1), ("n0", 2, 3), ("n0", 100, TRIES), ("n1", 100, 0)])
def test_a_node_that_may_be_given_back_forgets_what_is_kept_and_waits_for_it_a_few_times_only(node, fails, asked):
    told, kept = threading.Event(), Failing(fails)
    jobs = SimpleNamespace(get=lambda job: record())
    keeping = LogPreservation(kept, Fleet(), jobs)
    keeping.pools = frozenset({"grown"})
    # A controller asks again and again.
    wait_for(lambda: keeping.preserve_before(RemoveFiles(node, "j", 1), told.set) or told.is_set())
    keeping.close()
    assert kept.asked == asked
