import copy

import pytest
import torch
from torch import nn

from cluster.errors import UserError
from workers import backends
from workers.checkpoint import load, plan
from workers.errors import CheckpointError
from workers.tasks.context import Context


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
    (event,) = ctx.events.kept
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
    assert [event["step"] for event in ctx.events.kept] == [1, 2]
    assert all(0 < event["blocked_s"] <= ctx.checkpoint.blocked_s for event in ctx.events.kept)
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
    assert restored.report["random"]["all"].startswith("seeded anew with ")
    assert torch.equal(*draws)


def test_without_a_folder_saving_is_refused_with_a_remedy():
    ctx = Context(backends.create("cpu"))
    with pytest.raises(UserError, match="no checkpoint folder"):
        ctx.checkpoint.save(1, {"model": nn.Linear(1, 1)})


def test_the_name_we_keep_for_ourselves_is_refused(tmp_path):
    with pytest.raises(UserError, match="'random' in a checkpoint is ours"):
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
    assert there["random"] == {"rank 0": "seeded anew: saved on cpu, the target draws on xla"}
    assert sum(line["tensors"] for line in there["dtypes"]) == 2
