"""A disk that is full to the last byte: what runs goes on, obeys, and its end is told."""

import hashlib
import json
import os
import runpy
import subprocess
import zipfile
from pathlib import Path

import pytest

from workers.protocol import lease
from workers.tasks.event_writer import Events

AT_WORK = runpy.run_path(str(Path(__file__).parents[1] / "workers" / "attempt" / "conftest.py"))
LEASES = 3
TRAINS = """
import os, pathlib, time
def train(ctx):
    step, go_on = 0, pathlib.Path(ctx.arguments["go_on"])
    print("ready", flush=True)
    while not go_on.exists() and not ctx.preempted:
        step += 1
        ctx.report(step, loss=1.0)
        print("x" * 100, flush=True)
        time.sleep(0.001)
    return {"text": "x" * 20_000}
"""


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def node(disk):
    it = AT_WORK["Node"](disk)
    yield it
    (disk / "ballast").unlink(missing_ok=True)
    it.close()


def fill(disk):
    """To the last byte: small files take what is left between the blocks of large ones."""
    with (disk / "ballast").open("ab", buffering=0) as f:
        for size in (1 << 16, 4096, 512, 1):
            while True:
                try:
                    f.write(b"\0" * size)
                except OSError:
                    break
    with pytest.raises(OSError, match="No space left"):
        (disk / "more").write_text("x")
    (disk / "more").unlink()


def renewed(node, true, what):
    """Waits while the controller is heard all the time."""

    def heard():
        node.attempts.renew()
        node.attempts.wait_for_changes({}, {}, 0.0)
        return true()

    node.until(heard, what)


def outlived(node, leases):
    """The lease has been renewed this often since the disk was full, and the attempt has not ended."""
    deadlines_s = set()
    end = node.folder().lease
    renewed(node, lambda: deadlines_s.add(lease.deadline_s(end)) or len(deadlines_s) > leases, "it was renewed")
    assert not node.folder().outcome.exists()


def ended(node):
    renewed(node, node.folder().outcome.exists, "it ended")
    return AT_WORK["read_json"](node.folder().outcome)


def test_a_command_outlives_its_leases_and_its_outcome_is_told(node, disk):
    node.start(command=("sh", "-c", "mkfifo gate; echo ready; read line < gate; exit 3"))
    node.until_printed("ready")
    fill(disk)
    outlived(node, LEASES)
    with (node.folder().work(0) / "gate").open("w") as gate:
        gate.write("go on\n")
    told = ended(node)
    assert (told["state"], told["exit_codes"]) == ("failed", {"0": 3})
    assert node.reopen().live_attempts() == []


@pytest.mark.parametrize(("asked", "state"), [("cancel", "cancelled"), ("preempt", "preempted")])
def test_what_runs_is_stopped_as_asked(node, disk, asked, state):
    node.start(command=("sh", "-c", "echo ready; exec sleep 600"))
    node.until_printed("ready")
    fill(disk)
    node.attempts.stop("j", 1, asked)
    assert ended(node)["state"] == state


def test_cancel_overtakes_a_preemption(node, disk):
    node.start(command=("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"), grace_s=600.0)
    node.until_printed("ready")
    fill(disk)
    node.attempts.stop("j", 1, "preempt")
    node.attempts.stop("j", 1, "cancel")
    assert ended(node)["state"] == "cancelled"


def test_an_attempt_whose_supervisor_was_killed_is_told_lost(node, disk):
    node.start(command=("sh", "-c", "echo ready; exec sleep 600"))
    node.until_printed("ready")
    fill(disk)
    os.kill(node.supervisor_pid(), 9)
    assert ended(node)["state"] == "lost"


@pytest.mark.parametrize("end", ["finishes", "is preempted"])
def test_training_goes_on_and_its_result_is_told(node, disk, tmp_path, end):
    with zipfile.ZipFile(tmp_path / "sent.zip", "w") as z:
        z.writestr("train.py", TRAINS)
    data = (tmp_path / "sent.zip").read_bytes()
    sha = hashlib.sha256(data).hexdigest()
    node.packages.put(sha, 0, data, True)
    more = {"code_archive": sha, "arguments": {"go_on": str(tmp_path / "go_on")}, "lease_s": 5.0}
    node.start(task="train", command=(), entry="train.py:train", **more)
    renewed(node, lambda: node.folder().log(0).exists() and "ready" in node.folder().log(0).read_text(), "it trains")
    fill(disk)
    before = lease.deadline_s(node.folder().lease)
    renewed(node, lambda: lease.deadline_s(node.folder().lease) > before + 1, "its lease goes on")
    if end == "finishes":
        (tmp_path / "go_on").touch()
        told = ended(node)
        assert (told["state"], told["result"]["returned"]) == ("succeeded", {"text": "x" * 20_000}), node.text()
    else:
        node.attempts.stop("j", 1, "preempt")
        assert ended(node)["state"] == "preempted", node.text()


def test_events_of_a_full_disk_are_late_and_its_reports_lost(disk):
    events = Events(disk / "events.jsonl", 0)
    assert events.write("report", step=1)
    fill(disk)
    while events.write("report", step=2):
        pass
    assert not events.write("checkpoint", step=3, path="p")
    with pytest.raises(SystemExit, match="143"):
        events.preempted()
    (disk / "ballast").unlink()
    assert events.write("report", step=4)
    *_, checkpoint, note, report = (disk / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["type"] for line in (checkpoint, note, report)]
    assert kinds == ["checkpoint", "note", "report"]
