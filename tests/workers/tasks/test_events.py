import json
import subprocess
import sys

from workers.tasks.events import Events

WRITER = """
import sys
from pathlib import Path
from workers.tasks.events import Events
events = Events(Path(sys.argv[1]), int(sys.argv[2]))
for step in range(200):
    events.write("report", step=step, metrics={"text": "x" * 3000})
"""


def test_lines_of_many_ranks_never_mix(tmp_path):
    file = tmp_path / "events.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(file), str(rank)]) for rank in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert [[e["step"] for e in events if e["rank"] == rank] for rank in range(3)] == [list(range(200))] * 3


def test_without_a_file_events_are_kept():
    events = Events(None, 2)
    events.write("note", preempted=True)
    assert [{k: v for k, v in e.items() if k != "t"} for e in events.kept] == [
        {"rank": 2, "type": "note", "preempted": True}
    ]
