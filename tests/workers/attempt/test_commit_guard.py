"""A rank that was frozen and replaced meanwhile neither commits nor deletes a checkpoint. Real ranks, really frozen."""

import os
import signal
import sys

import pytest
from patience import LIMIT_S

from workers.attempt.rank_environment import CODE
from workers.checkpoint.format.step_folders import newest_first
from workers.checkpoint.saving import commit_guard
from workers.errors import AttemptReplaced
from workers.protocol import fence, lease
from workers.protocol.fence import FenceReader
from workers.protocol.folders import read_json
from workers.tasks import rank_main

SAVES = """
import os, signal, sys
import torch
from pathlib import Path
from workers.checkpoint import save
from workers.checkpoint.disk.files import Files
from workers.errors import CheckpointError

where, root = sys.argv[1], os.environ["POLYFLEET_CHECKPOINT_DIR"]

def freeze(point):
    if point == where:
        Path("frozen").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

class Freezing(Files):
    def rename(self, old, new):
        freeze(f"rename to {new.name.partition('-')[0]}")
        super().rename(old, new)

class State:
    def state_dict(self):
        freeze("before the save")
        return {"w": torch.ones(3)}
    def load_state_dict(self, state): ...

save(root, 1, {"w": torch.zeros(3)}, attempt="j.1")
try:
    save(root, 2, {"w": State()}, attempt="j.1", keep=1, files=Freezing())
    Path("said").write_text("saved")
except CheckpointError as e:
    Path("said").write_text(str(e))
"""


@pytest.fixture
def elsewhere(node, tmp_path):
    """Another node of the same storage, whose agent knows nothing of the first one's attempts."""
    other = type(node)(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/storage").symlink_to(tmp_path / "storage")
    yield other
    other.close()


def frozen(node, where):
    """Epoch 1 is stopped at that point, with everybody who could end it."""
    (node.root / "storage").mkdir(exist_ok=True)
    command, environment = (sys.executable, "-c", SAVES, where), {"PYTHONPATH": str(CODE)}
    grace_s = 10 * LIMIT_S  # who waited for it would not be gone in time
    node.start(command=command, checkpoint_root="jobs/j", environment=environment, grace_s=grace_s)
    pid = int(node.until_file(node.folder().work(0) / "frozen"))
    told = read_json(node.folder().supervisor)
    guards = [told["supervisor"][0], told["reaper"][0]]
    for guard in guards:
        os.kill(guard, signal.SIGSTOP)
    lease.write(node.folder().lease, -0.1)
    return pid, guards


def thawed(node, pid, guards):
    os.kill(pid, signal.SIGCONT)
    said = node.until_file(node.folder().work(0) / "said")
    for guard in guards:
        os.kill(guard, signal.SIGCONT)
    node.until_gone(pid)
    node.until_gone(guards[0])
    return said


def steps(node):
    return [folder.name[:13] for folder in newest_first(node.root / "storage/jobs/j")]


def test_a_rank_whose_lease_has_passed_before_its_commit_neither_commits_nor_deletes(node):
    said = thawed(node, *frozen(node, "before the save"))
    assert said.startswith("this attempt was replaced and cannot save: its lease ended ")
    assert steps(node) == ["step-00000001"]
    assert node.outcome()["state"] == "lost"


@pytest.mark.parametrize("where", ["rename to step", "rename to MANIFEST.json"])
def test_a_rank_that_is_frozen_in_its_commit_finds_nothing_to_commit_once_it_was_replaced(node, elsewhere, where):
    held = frozen(node, where)
    elsewhere.start(epoch=2, checkpoint_root="jobs/j")
    assert elsewhere.outcome(epoch=2)["state"] == "succeeded"
    assert "cannot save step 2" in thawed(node, *held)
    assert steps(node) == ["step-00000001"]


def test_an_attempt_counts_until_its_lease_has_passed_or_its_fence_was_raised(node, tmp_path):
    (tmp_path / "fences").mkdir()
    node.fences = FenceReader(folder=tmp_path / "fences")
    node.reopen()
    node.start(command=("sleep", "600"), epoch=2)
    folder = node.folder(epoch=2)
    assert commit_guard.replaced_reason(folder.shared) == ""
    (tmp_path / "fences/j").write_text("3\n")
    assert commit_guard.replaced_reason(folder.shared) == "attempt 3 of its job has superseded it"
    (tmp_path / "fences/j").write_text("2\n")
    assert commit_guard.replaced_reason(folder.shared) == ""
    lease.write(folder.lease, -1.0)
    assert commit_guard.replaced_reason(folder.shared).startswith("its lease ended 1.")
    folder.lease.unlink()
    assert commit_guard.replaced_reason(folder.shared) == "it has no lease"


def test_on_a_node_of_another_machine_an_attempt_counts_until_its_agent_ends_it_or_its_lease_has_passed(node):
    """There is no folder of fences there, and ranks never ask Ray's store: the agent does."""
    store = {"polyfleet/f1/fence/j": b"2"}
    node.fences = FenceReader("f1", None, lambda key, _limit_s: store.get(key))
    node.reopen()
    node.start(command=("sleep", "600"), epoch=2)
    folder = node.folder(epoch=2)
    node.until(folder.started.exists, "it runs")
    assert read_json(folder.launch)["fences"] == ""
    store["polyfleet/f1/fence/j"] = b"3"
    assert commit_guard.replaced_reason(folder.shared) == "", "no newer attempt starts before this lease has passed"
    fence.renew_or_stop(node.attempts.live_attempts(), node.fences)
    assert node.outcome(epoch=2)["state"] == "fenced"
    lease.write(folder.lease, -1.0)
    assert commit_guard.replaced_reason(folder.shared).startswith("its lease ended 1.")


def test_only_what_is_unfinished_is_withdrawn(tmp_path):
    names = [".part-step-00000001-00000000", "step-00000002-00000000", "step-00000003-00000000", "other"]
    for name in (*names, ".incoming-step-00000004-00000000"):
        (tmp_path / name).mkdir()
    (tmp_path / names[2] / "MANIFEST.json").touch()
    commit_guard.rename_unfinished_saves(tmp_path)
    kept = {path.name for path in tmp_path.iterdir()}
    assert {names[2], names[3], ".incoming-step-00000004-00000000"} < kept
    withdrawn = sorted(name.rpartition("-")[0] for name in kept if name.startswith(".part-"))
    assert withdrawn == [".part-step-00000001", ".part-step-00000002"]
    assert not {names[0], names[1]} & kept
    commit_guard.rename_unfinished_saves(tmp_path / "absent")


def test_a_save_that_was_refused_is_no_failure_of_the_users_code():
    try:
        try:
            raise AttemptReplaced(
                "this attempt was replaced and cannot save: its lease ended 1.0 s ago", "stop this attempt"
            )
        except AttemptReplaced as e:
            raise RuntimeError("saving failed") from e
    except RuntimeError as e:
        assert rank_main._kind(e) == "lost"
