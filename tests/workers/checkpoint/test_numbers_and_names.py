"""Which parameter a number in a file of torch.save means: told by names, by shapes and order, or by position."""

import copy
import re
from itertools import pairwise

import pytest
import torch
from lazy_modules import LazyModule
from torch import nn

from workers import checkpoint
from workers.checkpoint import import_checkpoint, load
from workers.errors import CheckpointError

dcp = LazyModule("torch.distributed.checkpoint")
state_dicts = LazyModule("torch.distributed.checkpoint.state_dict")
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # torch 2.8 about its own code
]


def adam(parameters, **options):
    return torch.optim.Adam(parameters, lr=0.01, **options)


def stepped(model, optimizer):
    """With state for every parameter that it has: gradients are random."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def taken_in(held, tmp_path, **options):
    torch.save(held, tmp_path / "file.pt")
    return import_checkpoint(tmp_path / "file.pt", tmp_path / "root", step=1, **options)


def averages(optimizer, names):
    return {names[id(p)]: slots["exp_avg"] for p, slots in optimizer.state.items()}


def names_of(model):
    return {id(p): name for name, p in model.named_parameters()}


def layers(*widths):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def test_another_grouping_is_served_by_names_that_shapes_and_order_tell(tmp_path, bits, torch_files):
    model = torch_files.Language()
    optimizer = adam(model.parameters())
    torch_files.train(model, optimizer, 2)
    told = taken_in({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    live = torch_files.Language()
    regrouped = adam([{"params": [p for p in live.parameters() if p.dim() == d]} for d in (1, 2)])
    loaded = load(told["path"], {"model": live, "optimizer": regrouped})
    assert bits(averages(regrouped, names_of(live))) == bits(averages(optimizer, names_of(model)))
    said = "parameters were matched by name; the names follow from shapes and order in the imported file"
    assert f"entry 'optimizer': {said}" in loaded.report.notes


UNCERTAIN = {
    "an average of the weights": (
        lambda m: {
            "model": m.state_dict(),
            "ema": copy.deepcopy(m.state_dict()),
            "optimizer": stepped(m, adam(m.parameters())).state_dict(),
        },
        "they fit model and ema equally well",
    ),
    "frozen layers of one shape": (
        lambda m: {"model": m.state_dict(), "optimizer": stepped(m, adam(m[1:].parameters())).state_dict()},
        r"1 of them and 2 tensors of model have the shape \[4, 4\]",
    ),
    "a group per layer": (
        lambda m: {
            "model": m.state_dict(),
            "optimizer": stepped(m, adam([{"params": [*layer.parameters()]} for layer in m])).state_dict(),
        },
        r"2 groups have parameters of shape \[4, 4\]",
    ),
    "backwards": (
        lambda m: {"model": m.state_dict(), "optimizer": stepped(m, adam([*m.parameters()][::-1])).state_dict()},
        "a group does not have them in the order of model",
    ),
    "no state": (
        lambda m: {"model": m.state_dict(), "optimizer": adam(m.parameters()).state_dict()},
        "no state shows the shapes of 6 of them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNCERTAIN)
def test_what_could_be_several_parameters_stays_by_number_and_the_import_says_why(what, tmp_path):
    make, why = UNCERTAIN[what]
    told = taken_in(make(layers(4, 4, 4, 2)), tmp_path)
    assert any(re.search(why, note) for note in told["notes"]), told["notes"]
    live = layers(4, 4, 4, 2)
    with pytest.raises(CheckpointError, match="build the optimizer with the groups that were saved, in the same order"):
        load(
            told["path"], {"model": live, "optimizer": adam([{"params": [p]} for p in reversed([*live.parameters()])])}
        )


def test_the_report_says_how_many_parameters_no_shape_could_be_compared_for(tmp_path):
    model, live = layers(4, 4), layers(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    model[0].weight.grad = torch.ones(4, 4)
    optimizer.step()
    told = taken_in({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    loaded = load(told["path"], {"model": live, "optimizer": torch.optim.SGD(live.parameters())})
    said = "parameters were matched by position, as torch does; 1 of 2 have no state that shows their shape"
    assert loaded.report.notes == [f"entry 'optimizer': {said}"]


def test_names_that_fit_no_single_model_give_way_to_positions(tmp_path, bits):
    model, live = layers(4, 4, 4), layers(4, 4, 4)
    optimizer, same = stepped(model, adam(model.parameters())), adam(live.parameters())
    held = state_dicts.get_optimizer_state_dict(model, optimizer)
    average = copy.deepcopy(model.state_dict())
    for models, why in [
        ({"model": model.state_dict(), "ema": average}, "not used: model and ema have the same names"),
        ({"model": {"0.weight": model[0].weight.data}}, "not used: model has no 0.bias, 1.weight, 1.bias"),
        ({}, "not used: no model in the file has them"),
    ]:
        told = taken_in({**models, "optimizer": held}, tmp_path)
        assert told["notes"][0].startswith(
            "optimizer: the file numbers its 4 parameters, and their names are uncertain"
        )
        assert why in told["notes"][0]
        load(told["path"], {"optimizer": same})
        assert bits(same.state_dict()) == bits(optimizer.state_dict())


def test_a_batch_norms_statistics_are_not_taken_for_parameters(tmp_path, tied, train):
    model = tied()
    optimizer = adam(model.parameters())
    train(model, optimizer, 2)
    told = taken_in({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    assert told["notes"] == ["optimizer: the file numbers its 5 parameters; their names follow from shapes and order."]


def test_every_shape_is_checked_before_anything_changes(tmp_path, image, torch_files):
    told = import_checkpoint(torch_files.saved(tmp_path / "ckpt.pt"), tmp_path / "root")
    live = torch_files.Language()
    turned = torch_files.decayed(live)
    group = turned.param_groups[0]["params"]
    group[1], group[2] = group[2], group[1]
    before = image(live, turned)
    with pytest.raises(CheckpointError, match="its groups have 5, 10 parameters, those of the live optimizer 1"):
        load(told["path"], {"optimizer": adam([*live.parameters()][:1])})
    said = r"parameter 1 has exp_avg of shape \[16, 8\], and the live parameter, at its position .* shape \[8, 16\]"
    with pytest.raises(CheckpointError, match=said):
        load(told["path"], {"optimizer": turned})
    assert image(live, turned) == before


def test_where_position_and_order_disagree_position_counts_and_the_report_says_so(tmp_path, bits):
    model, live = layers(4, 4, 4), layers(4, 4, 4)
    backwards = stepped(model, adam([layer.weight for layer in reversed(model)]))
    told = taken_in({"model": model.state_dict(), "optimizer": backwards.state_dict()}, tmp_path)
    same = adam([layer.weight for layer in reversed(live)])
    loaded = load(told["path"], {"model": live, "optimizer": same})
    assert bits(averages(same, names_of(live))) == bits(averages(backwards, names_of(model)))
    assert loaded.report.notes[-1].endswith("as torch does; by the model's order, 2 of 2 would be different ones")


@pytest.mark.parametrize("form", ["param_names", "names for numbers", "dcp"])
def test_names_in_the_file_find_their_parameters_in_any_order(form, tmp_path, bits):
    model, live = layers(4, 4, 4), layers(4, 4, 4)
    optimizer = stepped(model, adam(model.named_parameters() if form == "param_names" else model.parameters()))
    held = optimizer.state_dict() if form == "param_names" else state_dicts.get_optimizer_state_dict(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": held}
    if form == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "folder", no_dist=True)
        told = import_checkpoint(tmp_path / "folder", tmp_path / "root", step=1)
    else:
        told = taken_in(state, tmp_path)
    assert told["notes"] == ["optimizer: the file names its 4 parameters"]
    backwards = adam([*live.parameters()][::-1])
    load(told["path"], {"model": live, "optimizer": backwards})
    assert bits(averages(backwards, names_of(live))) == bits(averages(optimizer, names_of(model)))


def test_named_groups_with_equal_options_may_become_one(tmp_path, bits):
    model, live = layers(4, 4, 4), layers(4, 4, 4)
    optimizer = stepped(model, adam([{"params": [*model.named_parameters()][i::2]} for i in (0, 1)]))
    told = taken_in({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    joined = adam(live.parameters())
    load(told["path"], {"model": live, "optimizer": joined})
    assert bits(averages(joined, names_of(live))) == bits(averages(optimizer, names_of(model)))


def test_numbers_of_dcp_folders_come_back_and_the_order_of_their_tensors_is_not_believed(tmp_path, bits):
    model, live = layers(4, 4, 4), layers(4, 4, 4)
    for i, make in enumerate((adam, lambda p: torch.optim.SGD(p, lr=0.1))):
        optimizer = stepped(model, make(model.parameters()))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=tmp_path / f"folder{i}", no_dist=True)
        told = import_checkpoint(tmp_path / f"folder{i}", tmp_path / f"root{i}")
        assert told["entries"]["optimizer"] == "optimizer"
        assert "their names are uncertain" in told["notes"][0]
        same = make(live.parameters())
        load(told["path"], {"model": live, "optimizer": same})
        assert bits(same.state_dict()) == bits(optimizer.state_dict())


def test_dcp_reads_imported_state_by_name_and_by_number(tmp_path, torch_files):
    told = import_checkpoint(torch_files.saved(tmp_path / "ckpt.pt"), tmp_path / "root")
    first = load(told["path"]).state["optimizer"]["state"][0]["exp_avg"]
    for key in ("0", "wte.weight"):
        asked = {"optimizer": {"state": {key: {"exp_avg": torch.zeros_like(first)}}}}
        dcp.load(asked, storage_reader=checkpoint.PolyfleetStorageReader(told["path"]), no_dist=True)
        assert torch.equal(asked["optimizer"]["state"][key]["exp_avg"], first)


def test_state_of_another_kind_of_optimizer_is_refused(tmp_path, image, torch_files):
    told = import_checkpoint(torch_files.saved(tmp_path / "ckpt.pt"), tmp_path / "root")
    live = torch_files.Language()
    groups = [g["params"] for g in torch_files.decayed(live).param_groups]
    strange = torch_files.decayed(torch_files.Language())
    before = image(live)
    for kind, said in [
        (
            torch.optim.SGD,
            "not the state of SGD: its groups lack dampening, momentum, nesterov and have amsgrad, betas, eps",
        ),
        (torch.optim.RAdam, "not the state of RAdam: its groups have amsgrad"),
    ]:
        with pytest.raises(CheckpointError, match=said):
            load(told["path"], {"model": live, "optimizer": kind([{"params": group} for group in groups])})
    with pytest.raises(CheckpointError, match="not those of the saved modules"):
        load(told["path"], {"model": live, "optimizer": strange})
    assert image(live) == before


def test_state_that_belongs_to_no_parameter_stays_plain_values(tmp_path):
    for more in (lambda held: held["state"].update(k=torch.tensor([3])), lambda held: held.update(scale=2.0)):
        model = layers(2, 2)
        held, weights = stepped(model, adam(model.parameters())).state_dict(), model.state_dict()
        more(held)
        told = taken_in({"model": weights, "optimizer": held}, tmp_path)
        assert told["entries"]["optimizer"] == "tree"
        assert "is imported as plain values" in told["notes"][0]
        assert load(told["path"]).state["optimizer"]["param_groups"] == held["param_groups"]
