"""Optimizers from files of torch.save: loaded into live ones, training goes on as torch itself would go on."""

import json

import pytest
import torch
from torch import nn

from workers.checkpoint import export_checkpoint, import_checkpoint, load, save
from workers.checkpoint.format.manifest import NAME
from workers.errors import CheckpointError


def of_one_group(kind, **options):
    return lambda model: kind(model.parameters(), **options)


OPTIMIZERS = {
    "two groups": None,
    "SGD without state": of_one_group(torch.optim.SGD, lr=0.1),
    "SGD with momentum": of_one_group(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": of_one_group(torch.optim.Adam, lr=0.01),
    "Adam, lr a tensor": of_one_group(torch.optim.Adam, lr=torch.tensor(0.01)),
    "Adam, foreach": of_one_group(torch.optim.Adam, lr=0.01, foreach=True),
    "AdamW with amsgrad": of_one_group(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "RMSprop": of_one_group(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "NAdam": of_one_group(torch.optim.NAdam),
    "Adagrad": of_one_group(torch.optim.Adagrad),
    "Adafactor": of_one_group(torch.optim.Adafactor),
    "a group per parameter": lambda m: torch.optim.Adam(
        [{"params": [p], "lr": 0.01 / (i + 1), "name": n} for i, (n, p) in enumerate(m.named_parameters())]
    ),
    "a part of the model": lambda m: torch.optim.Adam(m.blocks[1].parameters(), lr=0.01),
    "from the last to the first": lambda m: torch.optim.Adam(reversed([*m.parameters()]), lr=0.01),
    "some without a gradient": lambda m: torch.optim.Adam(m.parameters()),
}


def of(what, files):
    """How its optimizer is made, and its model."""
    return OPTIMIZERS[what] or files.decayed, files.WithUnused if "without a gradient" in what else files.Language


@pytest.mark.parametrize("what", OPTIMIZERS)
def test_training_goes_on_bit_for_bit_as_in_torch_and_an_export_has_what_came_in(what, tmp_path, bits, torch_files):
    make, build = of(what, torch_files)
    file = torch_files.saved(tmp_path / "ckpt.pt", make, build())
    model = build()
    optimizer = make(model)
    told = import_checkpoint(file, tmp_path / "root")
    assert told["entries"] == {"model": "module", "optimizer": "optimizer"}
    loaded = load(told["path"], {"model": model, "optimizer": optimizer})
    by_torch, its_optimizer = torch_files.resumed_by_torch(file, make, build())
    assert bits(optimizer.state_dict()["state"]) == bits(its_optimizer.state_dict()["state"])
    assert torch_files.train(model, optimizer, 4, seed=1) == torch_files.train(by_torch, its_optimizer, 4, seed=1)
    assert bits(model.state_dict()) == bits(by_torch.state_dict())
    assert any("matched by position" in note for note in loaded.report.notes)
    export_checkpoint(told["path"], tmp_path / "back.pt", format="torch")
    before, after = (torch.load(path)["optimizer"] for path in (file, tmp_path / "back.pt"))
    assert bits(after) == bits(before) == bits(load(told["path"]).state["optimizer"])


def test_a_compiled_models_names_and_nanogpts_other_entries_change_nothing(tmp_path, bits, torch_files):
    file = torch_files.saved(
        tmp_path / "ckpt.pt", model_args={"n_layer": 2}, iter_num=7, best_val_loss=torch.tensor(2.5), config={"x": 1}
    )
    held = torch.load(file)
    held["model"] = {f"_orig_mod.{name}": tensor for name, tensor in held["model"].items()}
    torch.save(held, file)
    told = import_checkpoint(file, tmp_path / "root")
    assert told["entries"] == {
        "model": "module", "model_args": "tree", "config": "tree", "extra": "tree", "optimizer": "optimizer",
    }  # fmt: skip
    assert told["notes"] == ["optimizer: the file numbers its 15 parameters; their names follow from shapes and order."]
    model = torch_files.Language()
    optimizer = torch_files.decayed(model)
    loaded = load(told["path"], {"model": model, "optimizer": optimizer})
    assert loaded.state["extra"]["iter_num"] == 7
    by_torch, its_optimizer = torch_files.resumed_by_torch(file)
    assert torch_files.train(model, optimizer, 4) == torch_files.train(by_torch, its_optimizer, 4)


def test_names_that_were_worked_out_are_those_of_the_parameters_and_ties_count_once(tmp_path, torch_files):
    model = torch_files.Language()
    file = torch_files.saved(tmp_path / "ckpt.pt", model=model)
    told = import_checkpoint(file, tmp_path / "root")
    tree = json.loads((tmp_path / "root" / told["path"] / NAME).read_text())["entries"]["optimizer"]["tree"]
    names = [name for name, p in model.named_parameters() if p.dim() >= 2]
    names += [name for name, p in model.named_parameters() if p.dim() < 2]
    assert tree["names"] == {str(i): f"model/{name}" for i, name in enumerate(names)}


def test_lightning_tutorial_and_gan_files_have_their_optimizers_recognised(tmp_path, bits, torch_files):
    g, d = nn.Linear(4, 3), nn.Linear(3, 1)
    adam, sgd = torch.optim.Adam(g.parameters(), amsgrad=True), torch.optim.SGD(d.parameters(), 0.1, momentum=0.5)
    d(g(torch.randn(5, 4))).mean().backward()
    adam.step(), sgd.step()
    both, scheduler = [adam.state_dict(), sgd.state_dict()], torch.optim.lr_scheduler.StepLR(adam, 3).state_dict()
    names = {f"model.{name}": tensor for name, tensor in g.state_dict().items()}
    module, optimizer = "module", "optimizer"
    for i, (held, entries) in enumerate([
        (
            {"state_dict": names, "global_step": 9, "optimizer_states": both[:1], "lr_schedulers": [scheduler]},
            {"model": module, "optimizer": optimizer, "lr_schedulers": "tree", "extra": "tree"},
        ),
        (
            {"state_dict": names, "optimizer_states": both, "lr_schedulers": []},
            {"model": module, "optimizer.0": optimizer, "optimizer.1": optimizer, "lr_schedulers": "tree"},
        ),
        (
            {"model_state_dict": g.state_dict(), "optimizer_state_dict": both[0], "loss": 0.5},
            {"model": module, "optimizer": optimizer, "extra": "tree"},
        ),
        (
            {"g": g.state_dict(), "d": d.state_dict(), "opt_g": both[0], "opt_d": both[1]},
            {"g": module, "d": module, "opt_g": optimizer, "opt_d": optimizer},
        ),
        (
            {"optimizers": {"g": both[0], "d": both[1]}, "scheduler": scheduler},
            {"optimizers.g": optimizer, "optimizers.d": optimizer, "scheduler": "tree"},
        ),
        ({"optimizers": [both[0], None]}, {"optimizers": "tree"}),
    ]):  # fmt: skip
        torch.save(held, tmp_path / f"{i}.ckpt")
        assert import_checkpoint(tmp_path / f"{i}.ckpt", tmp_path / f"{i}")["entries"] == entries
    new_g, new_d = nn.Linear(4, 3), nn.Linear(3, 1)
    new = {"opt_g": torch.optim.Adam(new_g.parameters()), "opt_d": torch.optim.SGD(new_d.parameters(), 0.9)}
    load(tmp_path / "3", {"g": new_g, "d": new_d, **new})
    assert bits(new["opt_g"].state_dict()["state"]) == bits(both[0]["state"])
    assert bits(new["opt_d"].state_dict()) == bits(both[1])


def test_a_file_of_an_optimizer_alone_loads_without_its_model(tmp_path, bits, torch_files):
    file = torch_files.saved(tmp_path / "both.pt")
    held = torch.load(file)
    torch.save(held["model"], tmp_path / "pytorch_model.bin")
    torch.save(held["optimizer"], tmp_path / "optimizer.pt")
    weights = import_checkpoint(tmp_path / "pytorch_model.bin", tmp_path / "weights")
    told = import_checkpoint(tmp_path / "optimizer.pt", tmp_path / "state")
    assert told["entries"] == {"optimizer": "optimizer"}
    assert "there is no model in the file. Loading matches by position" in told["notes"][0]
    model = torch_files.Language()
    optimizer = torch_files.decayed(model)
    load(weights["path"], {"model": model})
    load(told["path"], {"optimizer": optimizer})
    by_torch, its_optimizer = torch_files.resumed_by_torch(file)
    assert torch_files.train(model, optimizer, 4) == torch_files.train(by_torch, its_optimizer, 4)
    narrow = torch_files.Language().to(torch.bfloat16)
    with pytest.raises(CheckpointError, match="would lose values: optimizer/state/0/exp_avg float32 -> bfloat16"):
        load(told["path"], {"optimizer": torch_files.decayed(narrow)})


def test_a_tie_that_a_move_to_xla_has_cut_counts_once(tmp_path, torch_files):
    file = torch_files.saved(tmp_path / "ckpt.pt")
    model = torch_files.Language()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    optimizer = torch_files.decayed(model)
    load(import_checkpoint(file, tmp_path / "root")["path"], {"model": model, "optimizer": optimizer})
    by_torch, its_optimizer = torch_files.resumed_by_torch(file)
    assert torch_files.train(model, optimizer, 4) == torch_files.train(by_torch, its_optimizer, 4)


def test_a_count_of_steps_that_was_a_number_before_torch_1_12_is_a_tensor_again(tmp_path, torch_files):
    file = torch_files.saved(tmp_path / "old.pt")
    held = torch.load(file)
    for slots in held["optimizer"]["state"].values():
        slots["step"] = int(slots["step"])
    for group in held["optimizer"]["param_groups"]:
        for key in ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            group.pop(key, None)
    torch.save(held, file)
    model = torch_files.Language()
    optimizer = torch_files.decayed(model)
    load(import_checkpoint(file, tmp_path / "root")["path"], {"model": model, "optimizer": optimizer})
    by_torch, its_optimizer = torch_files.resumed_by_torch(file)
    assert torch_files.train(model, optimizer, 3) == torch_files.train(by_torch, its_optimizer, 3)


def test_only_a_checkpoint_with_numbers_asks_for_a_newer_reader(tmp_path, torch_files):
    file = torch_files.saved(tmp_path / "ckpt.pt")
    model = torch_files.Language()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    named = torch_files.saved(tmp_path / "named.pt", lambda m: torch.optim.Adam(m.named_parameters()))
    made = {
        3: [import_checkpoint(file, tmp_path / "a")["path"]],
        2: [
            import_checkpoint(tmp_path / "weights.pt", tmp_path / "b")["path"],
            import_checkpoint(named, tmp_path / "c")["path"],
            save(tmp_path / "d", 1, {"model": model, "optimizer": torch_files.decayed(model)}).path,
        ],
    }
    for version, paths in made.items():
        for path in paths:
            assert json.loads((tmp_path / path / NAME).read_text())["version"] == version
