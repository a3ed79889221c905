"""Attempts without an agent: the user's folder, an order, and real processes as ranks."""

import json
import os
import shutil
import socket
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from patience import wait_for

sys.path.insert(0, str(Path(__file__).parent))

from forked_ranks import RankForks

from workers.protocol import lease
from workers.protocol.messages import Order

ROOT = Path(__file__).parents[3]


class Attempt:
    """An attempt's folder, with a lease as its node would keep it; `code` is the user's folder, where ranks run."""

    def __init__(self, forks, node, name, task="train", **order):
        self._forks = forks
        self.folder = node / "shared" / f"{name}.1.0"
        self.code = self.folder / "work"
        self.code.mkdir(parents=True)
        records = node / "attempts" / self.folder.name
        records.mkdir(parents=True)
        lease.write(records / "lease", 3600.0)
        known = {
            "job": "j",
            "epoch": 1,
            "backend": "cpu",
            "kind": "cpu",
            "emulated": False,
            "devices": (0,),
            "node_rank": 0,
        }
        known |= {
            "nodes": 1,
            "first_rank": 0,
            "ranks": 1,
            "world_size": 1,
            "master_address": "127.0.0.1",
            "master_port": 0,
        }
        self.order = asdict(Order(**(known | {"task": task, "entry": "user.py"} | order)))

    def write(self, source, name="user.py"):
        (self.code / name).write_text(source)

    def start(self, world_size=1):
        """The ranks as processes."""
        (self.folder / "order.json").write_text(json.dumps(self.order | {"world_size": world_size}))
        port = _free_port()
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "POLYFLEET_ATTEMPT_DIR": str(self.folder),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
        return [
            self._forks.start(
                variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, self.code, self.folder / f"rank-{rank}"
            )
            for rank in range(world_size)
        ]

    def run(self, world_size=1):
        """All ranks to their end, which must be a good one; their results by rank."""
        return self.finish(self.start(world_size))

    def run_in(self, folder, **how):
        """Run with a copy of the user's `folder` as the working folder."""
        shutil.copytree(folder, self.code, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        return self.run(**how)

    def finish(self, ranks):
        try:
            told = [rank.communicate() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0] * len(ranks), told
        return [json.loads((self.folder / f"result-{i}.json").read_text()) for i in range(len(ranks))]

    def until_reported(self, ranks):
        """Wait for the first report, or for an end that should not be."""
        told = self.folder / "events.jsonl"
        wait_for(lambda: (told.is_file() and self.events("report")) or any(rank.poll() is not None for rank in ranks))
        assert all(rank.poll() is None for rank in ranks), ranks[0].communicate()

    def events(self, kind):
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["type"] == kind]


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tests share few cores with much else; more threads than free cores slow small models down by tens of times."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def forks():
    forks = RankForks(ROOT)
    yield forks
    forks.close()


@pytest.fixture
def attempt(tmp_path, forks):
    """A maker of attempts, each in its own folder."""
    return lambda name="attempt", **order: Attempt(forks, tmp_path, name, **order)
