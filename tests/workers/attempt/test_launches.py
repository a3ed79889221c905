"""Commands once per node, which see what their user would see, and once per device, which see what torchrun tells."""

import json
import os
import socket
import subprocess
import sys

import pytest

from workers.attempt.rank_variables import is_torchruns

MEET = """
import json, os, sys, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump({"environ": dict(os.environ), "ranks": total.item(), "folder": os.getcwd()}, file)
dist.barrier()
dist.destroy_process_group()
"""
OF_ITS_AGENT = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""Where torchrun's agent looks for errors, and which signals it handles: there is no such agent here."""
DIFFER = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE"}
"""Each launch has its own of these; torchrun's agent hosts the store, where our rank 0 does."""


@pytest.fixture
def told(tmp_path):
    """told(where): by rank, what the two ranks of MEET wrote into the folder `where`."""
    (tmp_path / "meet.py").write_text(MEET)
    return lambda where: [json.loads((tmp_path / where / str(rank)).read_text()) for rank in (0, 1)]


@pytest.fixture
def torchrun(tmp_path):
    """The environment given to the real torchrun, once two ranks of MEET have run under it."""
    (tmp_path / "torchrun").mkdir()
    given = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {"LC_ALL": "C.UTF-8"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "meet.py"), str(tmp_path / "torchrun")]
    return lambda: subprocess.run(command, env=given, check=True, capture_output=True) and given


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_ranks_of_a_command_are_told_all_that_torchrun_tells_and_meet(node, tmp_path, told, torchrun):
    given = torchrun()
    (tmp_path / "ours").mkdir()
    two = {"launch": "ranks", "devices": (0, 1), "ranks": 2, "world_size": 2, "master_port": free_port()}
    node.start(command=(sys.executable, str(tmp_path / "meet.py"), str(tmp_path / "ours")), **two)
    assert node.outcome()["state"] == "succeeded", node.text()
    for theirs, ours in zip(told("torchrun"), told("ours"), strict=True):
        assert (ours["ranks"], ours["folder"]) == (theirs["ranks"], str(node.folder().work(0))), "one folder for both"
        names = set(theirs["environ"]) - set(given) - OF_ITS_AGENT
        assert {"RANK", "ROLE_NAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"} <= names
        assert names <= set(ours["environ"])
        same = names - DIFFER
        assert {n: ours["environ"][n] for n in same} == {n: theirs["environ"][n] for n in same}
        assert {n for n in ours["environ"] if is_torchruns(n)} <= set(theirs["environ"])
        assert ours["environ"]["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_a_command_that_runs_once_on_its_node_sees_no_variable_of_torchrun(node, monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "inherited")
    monkeypatch.setenv("POLYFLEET_POOL_VARIABLES", "RANK,TORCHELASTIC_RUN_ID")
    node.python("j", "import json, os; print(json.dumps(dict(os.environ)))", devices=(0, 1))
    assert node.outcome()["state"] == "succeeded"
    [line] = node.text()
    seen = json.loads(line.removeprefix("out "))
    assert not [name for name in seen if is_torchruns(name)]
    ours = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "NODE_RANK": "0", "NODES": "1", "DEVICE_COUNT": "2"}
    ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "JOB": "j", "EPOCH": "1", "ATTEMPT": "j.1"}
    assert {name: seen[f"POLYFLEET_{name}"] for name in ours} == ours
