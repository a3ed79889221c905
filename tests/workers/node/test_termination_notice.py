"""A node that is about to go: a real agent object, real ranks, and the file that says so."""

import hashlib
import json
import os
import signal
import sys
import zipfile

import pytest
from patience import LIMIT_S, wait_for

from cluster.errors import NotFound
from workers.attempt.supervision.supervisor_handle import read_pids
from workers.checkpoint import load
from workers.node import termination_notice
from workers.node.agent import Agent
from workers.processes import process_tree
from workers.protocol.folders import AttemptFolder
from workers.protocol.messages import PROTOCOL
from workers.storage.pool_checkpoints import PoolCheckpoints
from workers.storage.pool_storage import PoolStorage

SAVES = """
import json, os, signal, sys, time
def save(*_):
    with open(os.environ["POLYFLEET_ATTEMPT_DIR"] + "/events.jsonl", "a") as f:
        f.write(json.dumps({"t": time.time(), "rank": 0, "type": "note", "preempted": True}) + "\\n")
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
TRAINS = """
import time, torch

def train(ctx):
    model = torch.nn.Linear(2, 1)
    ctx.checkpoint.save(1, {"model": model}, asynchronous=False)
    print("ready", flush=True)
    while not ctx.preempted:
        time.sleep(0.01)
    ctx.checkpoint.save(2, {"model": model}, asynchronous=False)
"""


@pytest.fixture
def agent(tmp_path):
    it = Agent(tmp_path / "node", tmp_path / "storage", "n0", "p", "cpu")
    yield it
    (tmp_path / "node" / "notice").unlink(missing_ok=True)
    it.stop(1, "j", 1, "cancel")
    until(lambda: not it._attempts.live_attempts(), "nothing runs", it)


def until(true, what, agent):
    """By looking at the news, as a controller would."""
    wait_for(lambda: true() or (agent._attempts.wait_for_changes({}, {}, 0.0) and true()), what)


def start(agent, **more):
    fixed = {"job": "j", "epoch": 1, "task": "run", "backend": "cpu", "kind": "cpu", "emulated": False, "devices": [0]}
    fixed |= {"node_rank": 0, "nodes": 1, "first_rank": 0, "ranks": 1, "world_size": 1, "protocol": PROTOCOL}
    meet = {"master_address": "127.0.0.1", "master_port": 29500, "lease_s": 600.0, "grace_s": LIMIT_S}
    agent.start(1, fixed | meet | more, {})
    until(lambda: "ready" in printed(agent), "it runs", agent)


def printed(agent):
    try:
        return agent.logs("j", 1, 0, 0, 1 << 16)["data"]
    except NotFound:
        return ""


def give(tmp_path, **said):
    (tmp_path / "node" / "notice").write_text(json.dumps(said))


def facts(agent):
    """What the next watch tells of the node, which is due at once."""
    until(lambda: agent._facts_sent_s == float("-inf"), "there is news of the node", agent)
    return agent.poll(1, {}, {"j.1.0": "running"}, LIMIT_S)["facts"]


def ended(agent):
    told = []
    until(
        lambda: told.extend(r.outcome for r in agent._attempts.wait_for_changes({}, {}, 0.0) if r.outcome) or told,
        "it ends",
        agent,
    )
    return told[0]


def test_a_notice_is_told_with_the_next_watch_at_once_and_so_is_its_end(agent, tmp_path):
    assert agent.register(1)["facts"]["notice"] is None
    give(tmp_path, reason="spot machine", grace_s=3600)
    told = facts(agent)["notice"]
    assert told["reason"] == "spot machine"
    assert 3600 - LIMIT_S < told["deadline_s"] <= 3600
    (tmp_path / "node" / "notice").unlink()
    assert facts(agent)["notice"] is None


def test_a_watch_that_waits_is_answered_when_a_notice_comes(agent, tmp_path):
    start(agent, command=[sys.executable, "-c", SAVES])
    agent.poll(1, {}, {}, 0.0)
    give(tmp_path, grace_s=3600)
    answer = agent.poll(1, {}, {"j.1.0": "running"}, 3600.0)  # longer than this test may take
    assert answer["facts"]["notice"]["reason"] == "its machine got a termination notice"


def test_attempts_that_no_controller_asks_to_save_are_asked_by_the_agent(agent, tmp_path):
    start(agent, command=[sys.executable, "-c", SAVES])
    give(tmp_path, reason="SIGTERM", grace_s=LIMIT_S)
    outcome = ended(agent)
    assert (outcome.state, outcome.exit_codes) == ("preempted", {0: 0})
    assert "saved" in printed(agent)


@pytest.mark.parametrize("killed", ["never", "at once"])
def test_a_training_saves_within_its_grace_and_what_it_saved_before_a_sudden_end_counts(agent, tmp_path, killed):
    with zipfile.ZipFile(tmp_path / "sent.zip", "w") as z:
        z.writestr("train.py", TRAINS)
    data = (tmp_path / "sent.zip").read_bytes()
    sha = hashlib.sha256(data).hexdigest()
    agent.put_code_archive_part(sha, 0, data, True)
    start(agent, task="train", entry="train.py:train", code_archive=sha, checkpoint_root="c")
    give(tmp_path, reason="SIGTERM", grace_s=LIMIT_S)
    if killed == "at once":  # a machine that does not keep the promise
        of = read_pids(AttemptFolder(tmp_path / "node" / "attempts" / "j.1.0").supervisor)
        tree = process_tree.attempt_processes([of.reaper.pid], tmp_path / "node" / "shared" / "j.1.0")
        for pid in (of.reaper.pid, of.supervisor.pid, *tree):
            process_tree.send(pid, signal.SIGKILL)
    outcome = ended(agent)
    newest = load(tmp_path / "storage" / PoolCheckpoints(PoolStorage(tmp_path / "storage")).resolve("c")["path"]).step
    assert (outcome.state, newest) == (("lost", 1) if killed == "at once" else ("preempted", 2))


@pytest.mark.parametrize("content", [b"", b"SIGTERM", b"[1]", b'{"grace_s": -1, "reason": 7}', os.urandom(5000)])
def test_a_notice_is_one_whatever_stands_in_it(agent, tmp_path, content):
    agent.register(1)
    (tmp_path / "node" / "notice").write_bytes(content)
    told = facts(agent)["notice"]
    assert told["reason"] == "its machine got a termination notice"
    assert 20 < told["deadline_s"] <= 30


def test_a_notice_may_lie_where_a_variable_says_and_in_the_folder_of_the_node(tmp_path):
    environ = {termination_notice.VARIABLE: "/run/notice", termination_notice.NODE_DIR: "/home/nodes/n0"}
    found = termination_notice.notice_paths(tmp_path, environ)
    assert [str(path) for path in found] == [f"{tmp_path}/notice", "/home/nodes/n0/notice", "/run/notice"]
