import copy

import pytest
import torch
from torch import nn

from workers.checkpoint import describe, load, save
from workers.errors import CheckpointError


def test_a_model_comes_back_with_its_ties_and_buffers(tied, tmp_path, bits):
    model = tied()
    model(torch.arange(6))
    saved = save(tmp_path, 7, {"model": model})
    live = tied()
    loaded = load(tmp_path, {"model": live})
    assert (loaded.step, loaded.state["model"]) == (7, live)
    assert bits(live.state_dict()) == bits(model.state_dict())
    assert live.head.weight is live.embedding.weight
    assert describe(saved.path)["ties"] == {"model/head.weight": "model/embedding.weight"}


def test_a_live_model_whose_ties_came_undone_is_tied_again(tied, tmp_path):
    save(tmp_path, 1, {"model": tied()})
    live = tied()
    live.head.weight = nn.Parameter(live.head.weight.detach().clone())
    report = load(tmp_path, {"model": live}).report
    assert live.head.weight is live.embedding.weight
    assert report.retied == {"model/head.weight": "model/embedding.weight"}


def test_a_tie_the_checkpoint_does_not_have_is_kept_only_if_both_are_equal(tied, tmp_path):
    untied = tied()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    save(tmp_path, 1, {"model": untied})
    load(tmp_path, {"model": tied()})
    with torch.no_grad():
        untied.head.weight[0, 0] += 1
    save(tmp_path, 2, {"model": untied})
    with pytest.raises(
        CheckpointError, match=r"model/embedding\.weight and model/head\.weight are one tensor in the live"
    ):
        load(tmp_path, {"model": tied()})


def test_ties_between_two_saved_modules_are_stored_once(tied, tmp_path):
    model = tied()
    saved = save(tmp_path, 1, {"decoder": model.head, "model": model})
    assert "model/embedding.weight" in describe(saved.path)["ties"]
    live = tied()
    load(tmp_path, {"decoder": live.head, "model": live})
    assert torch.equal(live.embedding.weight, model.embedding.weight)


def test_names_are_the_models_own_whatever_wraps_it(tmp_path, bits):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)  # a name that string surgery would take off

    model = nn.Sequential(Inner(), nn.Linear(2, 2))
    plain = save(tmp_path / "plain", 1, {"model": model})
    inner = nn.Sequential(torch.compile(model[0], backend="eager"), model[1])
    compiled = save(tmp_path / "compiled", 1, {"model": torch.compile(inner, backend="eager")})
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        wrapped = save(tmp_path / "wrapped", 1, {"model": torch.compile(parallel, backend="eager")})
        live = copy.deepcopy(model)
        load(plain.path, {"model": nn.parallel.DistributedDataParallel(live)})
    finally:
        torch.distributed.destroy_process_group()
    names = [sorted(load(saved.path).state["model"]) for saved in (plain, compiled, wrapped)]
    assert names[0] == ["0.module.bias", "0.module.weight", "1.bias", "1.weight"]
    assert names == [names[0]] * 3
    assert bits(live.state_dict()) == bits(model.state_dict())


def test_different_names_are_refused_with_the_nearest(tmp_path, image):
    save(tmp_path, 1, {"model": nn.ModuleDict({"encoder": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})})
    live = nn.ModuleDict({"encodr": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    before = image(live)
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path, {"model": live})
    assert refused.value.message == (
        "entry 'model': tensor names differ: 2 only in the live model (model/encodr.bias, model/encodr.weight);"
        " 2 only in the checkpoint (model/encoder.bias, model/encoder.weight)"
    )
    assert "did you mean 'model/encoder.bias'?" in refused.value.remedy
    assert image(live) == before


def test_different_shapes_are_refused_and_named(tied, tmp_path, image):
    save(tmp_path, 1, {"model": tied(8)})
    live = tied(9)
    before = image(live)
    with pytest.raises(CheckpointError, match=r"model/middle\.weight is \[9, 9\] live and \[8, 8\] in the checkpoint"):
        load(tmp_path, {"model": live})
    assert image(live) == before


def test_channels_last_stays_as_the_live_model_has_it(tmp_path):
    saved, live = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    strides = live.weight.stride()
    save(tmp_path, 1, {"model": saved})
    load(tmp_path, {"model": live})
    assert live.weight.stride() == strides
    assert torch.equal(live.weight, saved.weight)


def test_extra_state_of_a_module_comes_back(tmp_path):
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model, live = nn.Sequential(Counting(1, 1)), nn.Sequential(Counting(1, 1))
    model[0].seen = 5
    save(tmp_path, 1, {"model": model})
    load(tmp_path, {"model": live})
    assert live[0].seen == 5
    with pytest.raises(CheckpointError, match=r"extra state of '0\.'"):
        load(tmp_path, {"model": nn.Sequential(nn.Linear(1, 1))})


def test_a_module_that_hides_its_state_is_refused(tmp_path):
    class Packed(nn.Module):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[f"{prefix}packed"] = torch.zeros(1)

    with pytest.raises(CheckpointError, match="model/0 is a Packed, which hides state of its own"):
        save(tmp_path, 1, {"model": nn.Sequential(Packed())})


def test_non_persistent_buffers_and_absent_parameters_are_no_part_of_it(tmp_path):
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    model.register_buffer("kept", torch.ones(3))
    save(tmp_path, 1, {"model": model})
    assert sorted(load(tmp_path).state["model"]) == ["kept", "weight"]


def test_entries_that_are_not_asked_for_are_left_out_and_said(tied, tmp_path):
    model = tied()
    optimizer = torch.optim.SGD(model.parameters())
    save(tmp_path, 1, {"model": model, "optimizer": optimizer, "rng": True, "extra": {"epoch": 3}})
    loaded = load(tmp_path, {"model": tied()})
    assert loaded.report.left_out == ["optimizer", "rng"]
    assert loaded.state["extra"] == {"epoch": 3}
    with pytest.raises(CheckpointError, match=r"no entry 'modell'; did you mean 'model'\?"):
        load(tmp_path, {"modell": tied()})


def test_dicts_and_lists_are_filled_anew_and_other_kinds_refused(tmp_path):
    save(tmp_path, 1, {"history": [1, 2], "extra": {"epoch": 3}})
    history, extra = [9, 9, 9], {"old": 1}
    loaded = load(tmp_path, {"history": history, "extra": extra})
    assert (history, extra) == ([1, 2], {"epoch": 3})
    assert loaded.state["extra"] is extra
    with pytest.raises(CheckpointError, match="'extra' was saved from a dict and cannot be loaded into a list"):
        load(
            tmp_path,
            {
                "history": history,
                "extra": [],
            },
        )
    with pytest.raises(CheckpointError, match="'extra' was saved from a tree and is loaded into a Linear"):
        load(tmp_path, {"extra": nn.Linear(1, 1)})
    assert history == [1, 2]
