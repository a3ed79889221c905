"""A node that really runs attempts: real supervisors and ranks, stopped again at the end of each test."""

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import psutil
import pytest
from patience import wait_for

from workers.attempt.attempts import AttemptManager
from workers.attempt.supervisor_launcher import SupervisorLauncher
from workers.protocol.fence import FenceReader
from workers.protocol.folders import AttemptFolder, read_json
from workers.protocol.messages import Order
from workers.storage.code_archives import NodeCodeArchives

STARTER = SupervisorLauncher()
"""With one zygote for all tests, begun by the first of them."""


class Node:
    def __init__(self, root):
        self.root = root
        self.packages = NodeCodeArchives(root / "packages")
        self.fences, self.starter = FenceReader(), STARTER
        self.attempts = self.reopen()

    def reopen(self):
        """What a restarted agent has: the same folder, and nothing remembered."""
        self.attempts = AttemptManager(
            self.root / "attempts",
            self.root / "storage",
            "n0",
            self.packages,
            lambda order: 1,
            self.fences,
            self.starter,
        )
        return self.attempts

    def order(self, job="j", command=("true",), **more):
        fixed = {
            "task": "run",
            "backend": "cpu",
            "kind": "cpu",
            "emulated": False,
            "devices": (0,),
            "nodes": 1,
            "epoch": 1,
        }
        ranks = {"node_rank": 0, "first_rank": 0, "ranks": 1, "world_size": 1, "lease_s": 600.0}
        meet = {"master_address": "127.0.0.1", "master_port": 29500}
        return Order(**(fixed | ranks | meet | {"job": job, "command": tuple(command)} | more))

    def start(self, job="j", command=("true",), secrets=None, **more):
        self.attempts.start(self.order(job, command, **more), secrets or {})

    def python(self, job, code, secrets=None, **more):
        self.start(job, (sys.executable, "-c", code), secrets, **more)

    def train(self, text, job="j", **more):
        """A training of the user's file train.py with this text."""
        sent = self.root / "sent.zip"
        with zipfile.ZipFile(sent, "w") as z:
            z.writestr("train.py", text)
        data = sent.read_bytes()
        sha = hashlib.sha256(data).hexdigest()
        self.packages.put(sha, 0, data, True)
        self.start(job, (), task="train", entry="train.py:train", code_archive=sha, **more)

    def folder(self, job="j", epoch=1, node_rank=0):
        return AttemptFolder(self.root / "attempts" / f"{job}.{epoch}.{node_rank}")

    def outcome(self, job="j", epoch=1, node_rank=0):
        """Waits for the end, as a controller would: by looking at the news."""
        path = self.folder(job, epoch, node_rank).outcome
        self.until(lambda: self.attempts.wait_for_changes({}, {}, 0.0) and path.exists(), f"{job} ended")
        return read_json(path)

    def text(self, job="j", rank=0):
        """A rank's log without time stamps."""
        lines = self.attempts.log(job, 1, rank, 0, 1 << 20)["data"].splitlines()
        return [line.partition(" ")[2] for line in lines]

    def until_printed(self, text, job="j", rank=0):
        path = self.folder(job).log(rank)
        self.until(lambda: path.exists() and text in path.read_text(), f"{job} printed {text!r}")

    def until_file(self, path):
        self.until(lambda: Path(path).exists() and Path(path).read_text(), f"{path} is there")
        return Path(path).read_text()

    def until_gone(self, pid):
        self.until(lambda: not alive(pid), f"process {pid} is gone")

    def until(self, true, what):
        wait_for(true, lambda: f"{what}\n{self.state()}")

    def state(self):
        return "\n".join(f"{p}: {p.read_text()[-500:]}" for p in self.root.glob("[as]*/*/*") if p.is_file())

    def supervisor_pid(self, job="j"):
        return read_json(self.folder(job).supervisor)["pid"]

    def close(self):
        for attempt in self.reopen().live_attempts():
            self.attempts.stop(attempt.id.job, attempt.id.epoch, "cancel")
        for attempt in self.attempts.live_attempts():
            self.outcome(attempt.id.job, attempt.id.epoch)


def alive(pid):
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def zygote():
    """Starts supervisors as an agent does."""
    STARTER.start()
    yield STARTER
    STARTER.close()


@pytest.fixture
def node(tmp_path, zygote):
    it = Node(tmp_path)
    yield it
    it.close()


@pytest.fixture
def is_alive():
    return alive


@pytest.fixture
def written():
    """written(path) reads JSON lines."""
    return lambda path: [json.loads(line) for line in Path(path).read_text().splitlines()]
