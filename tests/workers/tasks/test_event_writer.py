import json
import subprocess
import sys

from patience import LIMIT_S

from workers.protocol.redaction import Redactor
from workers.tasks.event_writer import Events

WRITER = """
import sys
from pathlib import Path
from workers.tasks.event_writer import Events
events = Events(Path(sys.argv[1]), int(sys.argv[2]))
for step in range(200):
    events.write("report", step=step, metrics={"text": "x" * 3000})
"""


def test_lines_of_many_ranks_never_mix(tmp_path):
    file = tmp_path / "events.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(file), str(rank)]) for rank in range(3)]
    assert [writer.wait(LIMIT_S) for writer in writers] == [0, 0, 0]
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert [[e["step"] for e in events if e["rank"] == rank] for rank in range(3)] == [list(range(200))] * 3


def test_without_a_file_events_are_kept():
    events = Events(None, 2)
    events.write("note", preempted=True)
    assert [{k: v for k, v in e.items() if k != "t"} for e in events.in_memory] == [
        {"rank": 2, "type": "note", "preempted": True}
    ]


def test_of_an_event_only_what_the_user_says_is_masked():
    """Passwords such as "step" or "home" must not cost a job its checkpoints."""
    events = Events(None, 0, Redactor(["step", "home", "loss"]))
    events.write("checkpoint", step=3, path="/home/j/step-3")
    events.write("report", step=3, loss=0.5, note="at home")
    events.write("note", resumed_step=3, skipped=["home"])
    fields = [{k: v for k, v in event.items() if k not in ("t", "rank", "type")} for event in events.in_memory]
    assert fields == [
        {"step": 3, "path": "/home/j/step-3"},
        {"step": 3, "***": 0.5, "note": "at ***"},
        {"resumed_step": 3, "skipped": ["***"]},
    ]
