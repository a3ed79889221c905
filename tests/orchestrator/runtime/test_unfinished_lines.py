"""The unfinished line of a process that is silent is in the log that the server reads, and later completed."""

import sys
from pathlib import Path

import pytest
from patience import wait_for

sys.path.insert(0, str(Path(__file__).parents[2] / "attacks"))

from log_readers import Direct, Node, reader, record

CODE = """
import os, sys, time
print("ready", flush=True)
sys.stdout.write("shard 7 of 9 ... "); sys.stdout.flush()
while not os.path.exists(sys.argv[1]): time.sleep(0.02)
print("done"); print("last")
"""


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path)
    yield made
    made.close()


def texts(page):
    return [(line["text"], line.get("unfinished", False), line.get("continues", False)) for line in page["lines"]]


def test_it_is_shown_while_the_process_is_silent_and_completed_when_it_ends(node, tmp_path):
    go = tmp_path / "go"
    node.start(command=(sys.executable, "-c", CODE, str(go)))
    logs, job = reader(Direct(n0=node.attempts)), record()

    def read(cursor):
        return logs.read(job, None, None, cursor, 1 << 20)

    wait_for(lambda: len(read({})["lines"]) == 2, lambda: f"two lines: {read({})}")
    before = read({})
    assert texts(before) == [("ready", False, False), ("shard 7 of 9 ... ", True, False)]
    assert texts(logs.tail(job, None, None, 1)) == [("shard 7 of 9 ... ", True, False)]
    go.touch()
    node.outcome()
    assert texts(read(before["cursor"])) == [("done", False, True), ("last", False, False)]
    assert texts(read({})) == [(text, False, False) for text in ("ready", "shard 7 of 9 ... done", "last")]
    assert texts(logs.tail(job, None, None, 2)) == [("shard 7 of 9 ... done", False, False), ("last", False, False)]
    assert texts(logs.tail(job, None, None, 0)) == []
