import copy
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import workers
from cluster.errors import UserError
from workers.checkpoint import DamagedCheckpoint, load, plan
from workers.checkpoint.disk.damage_marks import damage_reason
from workers.devices import backends
from workers.errors import CheckpointError
from workers.tasks.context import Context
from workers.tasks.rank_main import failure_record
from workers.tasks.resume_choice import candidate_checkpoints


def context(root, resume_from="", **given):
    return Context(backends.create("cpu"), checkpoint_root=str(root), resume_from=resume_from, attempt="j.1", **given)


def pair():
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer):
    optimizer.zero_grad()
    nn.functional.dropout(model(torch.rand(4, 3)), 0.5).square().mean().backward()
    optimizer.step()


def test_a_run_that_is_resumed_goes_on_as_if_nothing_had_happened(tmp_path):
    first = context(tmp_path, seed=1)
    first.backend.seed(1)
    model, optimizer = pair()
    step(model, optimizer)
    path = first.checkpoint.save(1, {"model": model, "optimizer": optimizer, "extra": {"best": 0.5}})
    step(model, optimizer)
    want = copy.deepcopy(model.state_dict())

    second = context(tmp_path, resume_from=path, seed=1)
    second.backend.seed(99)
    model, optimizer = pair()
    restored = second.checkpoint.restore({"model": model, "optimizer": optimizer})
    step(model, optimizer)
    assert (restored.step, restored.extra, restored.report["random"]) == (1, {"best": 0.5}, {"all": "exact"})
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())
    assert second.last_step == 1


def test_a_checkpoint_is_told_to_the_fleet_with_its_path_and_size(tmp_path):
    ctx = context(tmp_path)
    path = ctx.checkpoint.save(7, {"model": nn.Linear(2, 2)})
    ctx.checkpoint.wait()
    (event,) = ctx.events.in_memory
    assert (event["type"], event["step"], event["path"]) == ("checkpoint", 7, path)
    assert event["bytes"] > 0
    assert ctx.checkpoint.saved == 1


def test_training_goes_on_while_a_checkpoint_is_written_and_its_end_waits(tmp_path):
    ctx = context(tmp_path)
    model = nn.Linear(600, 600)
    before = model.weight.detach().clone()
    with ctx.running():
        path = ctx.checkpoint.save(1, {"model": model})
        with torch.no_grad():
            model.weight.zero_()
        ctx.checkpoint.save(2, {"model": model})
    assert [event["step"] for event in ctx.events.in_memory] == [1, 2]
    assert all(0 < event["blocked_s"] <= ctx.checkpoint.blocked_s for event in ctx.events.in_memory)
    assert torch.equal(load(path).state["model"]["weight"], before)


def test_a_checkpoint_that_cannot_be_written_ends_the_job_with_its_error(tmp_path):
    ctx = context(tmp_path / "file")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot save step 1"), ctx.running():
        ctx.checkpoint.save(1, {"model": nn.Linear(1, 1)})


def test_a_root_may_be_resumed_from_and_means_its_newest(tmp_path):
    ctx = context(tmp_path)
    model = nn.Linear(2, 2)
    ctx.checkpoint.save(1, {"model": model})
    ctx.checkpoint.save(2, {"model": model})
    assert context(tmp_path, resume_from=str(tmp_path)).checkpoint.restore({"model": nn.Linear(2, 2)}).step == 2


def test_a_fresh_start_restores_nothing(tmp_path):
    ctx = context(tmp_path)
    assert not ctx.resumed
    assert ctx.checkpoint.restore({"model": nn.Linear(2, 2)}) is None


def test_random_state_of_another_number_of_ranks_is_seeded_anew_and_the_report_says_so(tmp_path):
    path = context(tmp_path).checkpoint.save(3, {"model": nn.Linear(2, 2)})
    draws = []
    for _ in range(2):
        ctx = context(tmp_path, resume_from=path, world_size=2)
        restored = ctx.checkpoint.restore({"model": nn.Linear(2, 2)})
        draws.append(torch.rand(3))
    assert restored.report["random"]["all"].startswith("seeded with ")
    assert torch.equal(*draws)


def test_without_a_folder_saving_is_refused_with_a_remedy():
    ctx = Context(backends.create("cpu"))
    with pytest.raises(UserError, match="no checkpoint folder"):
        ctx.checkpoint.save(1, {"model": nn.Linear(1, 1)})


def test_the_name_we_keep_for_ourselves_is_refused(tmp_path):
    with pytest.raises(UserError, match="'random' in a checkpoint is reserved"):
        context(tmp_path).checkpoint.save(1, {"random": 1})


def test_an_older_attempt_may_not_save_over_a_newer_one(tmp_path):
    Context(backends.create("cpu"), checkpoint_root=str(tmp_path), attempt="j.2").checkpoint.save(
        1, {"model": nn.Linear(1, 1)}
    )
    with pytest.raises(CheckpointError):
        context(tmp_path).checkpoint.save(2, {"model": nn.Linear(1, 1)})


def test_a_plan_says_that_random_numbers_go_on_only_on_the_same_type_of_device(tmp_path):
    path = context(tmp_path).checkpoint.save(1, {"model": nn.Linear(2, 2)}, asynchronous=False)
    here, there = plan(path, "cpu"), plan(path, "tpu:emulated")
    assert here["random"] == {"rank 0": "continued"}
    assert there["random"] == {"rank 0": "reseeded: saved on cpu, the target draws on xla"}
    assert sum(line["tensors"] for line in there["dtypes"]) == 2


def saved(root, steps):
    """Checkpoints of a job, whose weights are their step."""
    ctx = context(root)
    for number in steps:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, number)
        path = Path(ctx.checkpoint.save(number, {"model": model}, asynchronous=False))
    return sorted(path.parent.glob("step-*"))


def rotten(folder):
    [shard] = folder.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_a_job_resumes_from_the_newest_checkpoint_that_is_sound_and_marks_the_others(tmp_path, capsys):
    folders = saved(tmp_path, (1, 2, 3))
    rotten(folders[1])
    rotten(folders[2])
    ctx, model = context(tmp_path, resume_from=str(folders[2])), nn.Linear(2, 2)
    restored = ctx.checkpoint.restore({"model": model})
    assert (restored.step, model.weight.unique().tolist()) == (1, [1.0])
    assert [one["path"] for one in restored.report["skipped"]] == [str(folders[2]), str(folders[1])]
    assert "chunk 1 of 1 is not what was saved" in damage_reason(folders[2]) and damage_reason(folders[1])
    assert (
        f"polyfleet: checkpoint {folders[2].name} is damaged, so the job does not resume from it"
        in capsys.readouterr().err
    )
    later = Path(ctx.checkpoint.save(2, {"model": model}, asynchronous=False))
    third = context(tmp_path, resume_from=str(folders[2]))  # it was placed before the mark was seen
    assert candidate_checkpoints(Path(third.checkpoint.resume_from), tmp_path) == [folders[2], later, folders[0]]


def test_where_none_is_sound_it_is_an_error_and_what_was_filled_is_never_saved(tmp_path):
    folders = saved(tmp_path, (1, 2))
    for folder in folders:
        rotten(folder)
    ctx, model = context(tmp_path, resume_from=str(folders[1])), nn.Linear(2, 2)
    told = r"shard-00001.safetensors: chunk 1 of 1 is not what was saved .*; 1 older are damaged too"
    with pytest.raises(DamagedCheckpoint, match=told) as error:
        ctx.checkpoint.restore({"model": model})
    assert failure_record(error.value, 0)["kind"] == "storage"
    for go_on in (lambda: ctx.checkpoint.save(3, {"model": model}), ctx.checkpoint.wait):
        with pytest.raises(DamagedCheckpoint):
            go_on()


def test_in_place_of_a_checkpoint_that_a_user_named_nothing_else_is_loaded(tmp_path):
    folders = saved(tmp_path / "other", (1, 2))
    rotten(folders[1])
    with pytest.raises(DamagedCheckpoint):
        context(tmp_path / "mine", resume_from=str(folders[1])).checkpoint.restore({"model": nn.Linear(2, 2)})
    whole = context(tmp_path / "mine", resume_from=str(folders[1].parent))
    assert whole.checkpoint.restore({"model": nn.Linear(2, 2)}).step == 1


def test_what_is_restored_in_two_calls_comes_from_one_checkpoint(tmp_path):
    ctx = context(tmp_path)
    for number in (1, 2):
        state = {"model": nn.Linear(2, 2), "more": {"t": torch.zeros(3 << 20)}}
        path = Path(ctx.checkpoint.save(number, state, asynchronous=False))
    again = context(tmp_path, resume_from=str(path))
    assert again.checkpoint.restore({"model": nn.Linear(2, 2)}).step == 2
    rotten(path)  # in the other entry
    with pytest.raises(DamagedCheckpoint):
        again.checkpoint.restore({"more": {}})


GANG = """
import os, sys
from pathlib import Path
from torch import nn
from workers.devices import backends
from workers.tasks.context import Context
from workers.tasks.resume_choice import candidate_checkpoints

root, path = sys.argv[1:]
rank = int(os.environ["RANK"])
ctx = Context(backends.create("cpu"), rank=rank, world_size=2, checkpoint_root=root, resume_from=path)
with ctx.running():
    if ctx.rank == 1:  # its own disk has lost a bit, that of rank 0 has not
        copy = Path(root).with_name("of-rank-1")
        ctx.checkpoint._root, ctx.checkpoint.resume_from = str(copy), str(copy / Path(path).name)
    model = nn.Linear(2, 2)
    restored = ctx.checkpoint.restore({"model": model})
    print(ctx.rank, restored.step, model.weight.unique().tolist(), Path(ctx.checkpoint.resume_from).name)
"""


def test_all_ranks_resume_from_the_same_checkpoint_where_one_of_them_finds_damage(tmp_path):
    folders = saved(tmp_path / "of-rank-0", (1, 2))
    shutil.copytree(tmp_path / "of-rank-0", tmp_path / "of-rank-1")
    rotten(tmp_path / "of-rank-1" / folders[1].name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    code = {"PYTHONPATH": str(Path(workers.__file__).parents[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GANG, str(tmp_path / "of-rank-0"), str(folders[1])],
            env=os.environ | meet | code | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [rank.communicate()[0] for rank in ranks]
    assert told == [f"{rank} 1 [1.0] {folders[0].name}\n" for rank in range(2)]
    assert damage_reason(tmp_path / "of-rank-1" / folders[1].name)
    assert not damage_reason(folders[1])  # there it is sound
