"""What is imported and exported again is the same file to the program that wrote it: also from another folder, and
after a conversion. What is not taken is named."""

import argparse
import json
import math
import pathlib
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lazy_modules import LazyModule
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from workers.checkpoint import export_checkpoint, load, save
from workers.checkpoint.exchange.importer import import_here
from workers.checkpoint.format.manifest import DamagedCheckpoint, manifest_digest
from workers.checkpoint.format.manifest_checks import read_manifest
from workers.checkpoint.loading.converter import convert
from workers.checkpoint.transfer.copier import copy
from workers.errors import CheckpointError

dcp = LazyModule("torch.distributed.checkpoint")
format_utils = LazyModule("torch.distributed.checkpoint.format_utils")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def differences(a, b, at="", dtype=None):
    """Where two values differ in type, keys, their order, or bits. Floating tensors of `b` may have `dtype`."""
    if type(a) is not type(b):
        return [f"{at}: {type(a).__name__} became {type(b).__name__}"]
    if isinstance(a, dict):
        if [*map(repr, a)] != [*map(repr, b)]:
            return [f"{at}: keys {[*a]} became {[*b]}"]
        metadata = differences(getattr(a, "_metadata", None), getattr(b, "_metadata", None), f"{at}._metadata")
        return metadata + [d for key in a for d in differences(a[key], b[key], f"{at}/{key}", dtype)]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{at}: {len(a)} items became {len(b)}"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{at}/{i}", dtype)]
    if isinstance(a, torch.Tensor):
        a = a.to(b.dtype if not a.dim() else dtype) if dtype is not None and a.dtype == torch.float32 else a
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [f"{at}: {a} became {b}"]
    if isinstance(a, np.ndarray | np.generic):
        return [] if a.dtype == b.dtype and np.array_equal(a, b) else [f"{at}: {a} became {b}"]
    if isinstance(a, argparse.Namespace):
        return differences(vars(a), vars(b), at, dtype)
    return [] if repr(a) == repr(b) else [f"{at}: {a!r} became {b!r}"]


def trained():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() > 1]},
         {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95),
    )  # fmt: skip
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def by_names(model, optimizer):
    """As torch.distributed.checkpoint.state_dict has an optimizer: names in place of numbers."""
    names = [name for name, _ in model.named_parameters()]
    held = optimizer.state_dict()
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in held["param_groups"]]
    return {"state": {names[i]: slots for i, slots in held["state"].items()}, "param_groups": groups}


SCRIPTS = ("gpt", "tutorial", "lightning", "imagenet", "gan", "named", "weights", "optimizer", "odd", "list")


def scripts():
    """Files as well-known scripts write them, and the step that each tells."""
    model, optimizer = trained()
    weights, state = model.state_dict(), optimizer.state_dict()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10).state_dict()
    compiled = OrderedDict((f"_orig_mod.{name}", tensor) for name, tensor in weights.items())
    best = torch.tensor(1.5)
    made = {
        "gpt": ({"model": compiled, "optimizer": state, "model_args": {"n_layer": 2, "bias": False, "dropout": 0.0},
                 "iter_num": 40, "best_val_loss": best, "config": {"betas": (0.9, 0.95), "o": "o", "seed": None}}, 40),
        "tutorial": ({"epoch": 7, "model_state_dict": weights, "optimizer_state_dict": state, "loss": 0.25}, 7),
        "lightning": ({"epoch": 1, "global_step": 12, "pytorch-lightning_version": "2.6.6", "state_dict": weights,
                       "loops": {"fit_loop": {"state_dict": {}}}, "callbacks": {}, "optimizer_states": [state],
                       "lr_schedulers": [scheduler], "hparams_name": "kwargs"}, 12),
        "imagenet": ({"epoch": 3, "arch": "resnet18", "state_dict": weights, "best_acc1": best, "optimizer": state,
                      "scheduler": scheduler, "args": argparse.Namespace(lr=0.1, out=pathlib.Path("a/b"))}, 3),
        "gan": ({"nets": {"g": weights, "d": weights}, "optimizers": {"g": state, "d": state}, "steps": 5}, 5),
        "named": ({"model": weights, "optim": by_names(model, optimizer), "train_state": {"step": torch.tensor(9)}}, 9),
        "weights": (weights, None),
        "optimizer": (state, None),
        "odd": ({"iteration": np.int64(8), 3: "three", None: 0, "t": (1, 2.0, True), "none": None, "empty": {},
                 "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cuda:1"),
                 "rng": [np.arange(4), torch.get_rng_state()], "shared": [best, best]}, 8),
        "list": ([1, (2, best)], None),
    }  # fmt: skip
    assert tuple(made) == SCRIPTS
    return made


def saved(value, path):
    torch.save(value, path)
    return path


def returned(path):
    target = path.parent / f"{path.name}.pt"
    export_checkpoint(path, target, format="torch")
    return torch.load(target, weights_only=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gets_its_own_file_back_and_the_import_knows_its_step(name, tmp_path):
    value, step = scripts()[name]
    told = import_here(str(saved(value, tmp_path / "file.pt")), str(tmp_path / "in"))
    assert told["step"] == (step or 0)
    assert any("contains no step number" in note for note in told["notes"]) == (step is None)
    moved = copy(told["path"], str(tmp_path / "pool"))["target"]
    for path in (pathlib.Path(told["path"]), pathlib.Path(moved)):
        back = returned(path)
        assert differences(value, back) == []
    if name == "odd":
        assert back["shared"][0] is back["shared"][1]


@pytest.mark.parametrize("wrapped", [lambda state: state, lambda state: {"a": [state], "step": 1}])
def test_versions_of_modules_that_a_script_wrote_as_a_plain_dict_come_back(wrapped, tmp_path):
    state = trained()[0].state_dict()
    state._metadata = {"": {"version": 1}, "1": {"version": 2}}
    told = import_here(str(saved(wrapped(state), tmp_path / "file.pt")), str(tmp_path / "in"))
    assert differences(wrapped(state), returned(pathlib.Path(told["path"]))) == []


@pytest.mark.parametrize("name", ["gpt", "gan", "named"])
def test_a_converted_copy_keeps_the_form(name, tmp_path):
    value, _ = scripts()[name]
    told = import_here(str(saved(value, tmp_path / "file.pt")), str(tmp_path / "in"))
    told = convert(told["path"], tmp_path / "half", dtype={"float32": "bfloat16"}, on_lossy="allow")
    assert differences(value, returned(pathlib.Path(told["path"])), dtype=torch.bfloat16) == []


def test_a_dcp_folder_comes_back_as_one_and_as_a_file(tmp_path):
    model, optimizer = trained()
    value = {"app": {"model": dict(model.state_dict()), "optim": by_names(model, optimizer), "train": {"step": 30}}}
    dcp.save(value, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / "notes.txt").write_text("mine")
    told = import_here(str(tmp_path / "dcp"), str(tmp_path / "in"))
    assert told["left_out"] == [{"name": "notes.txt", "reason": "it is not part of the checkpoint"}]
    export_checkpoint(told["path"], tmp_path / "file.pt", format="torch")
    assert differences(value["app"]["model"], torch.load(tmp_path / "file.pt")["app"]["model"]) == []
    export_checkpoint(told["path"], tmp_path / "out", format="dcp")
    blank = {"app": {"model": {k: torch.zeros_like(v) for k, v in value["app"]["model"].items()}}}
    dcp.load(blank, checkpoint_id=tmp_path / "out", no_dist=True)
    assert differences(value["app"]["model"], blank["app"]["model"]) == []


NUMBERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.binary(max_size=4),
    st.complex_numbers(),
)
TENSORS = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.randn(shape).to(dtype))
)
KEYS = st.one_of(st.text(max_size=6), st.integers(-3, 3), st.none(), st.tuples(st.integers(0, 1), st.text(max_size=1)))
MODULES = st.dictionaries(st.text(min_size=1, max_size=4), TENSORS, min_size=1, max_size=3)
OPTIMIZERS = st.just(None).map(lambda _: trained()[1].state_dict())
TREES = st.recursive(
    st.one_of(NUMBERS, TENSORS, MODULES, MODULES.map(OrderedDict), OPTIMIZERS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=TREES)
def test_any_tree_of_plain_values_and_tensors_comes_back_the_same(value, tmp_path_factory):
    assume(not isinstance(value, dict) or len(value))  # one without anything is refused
    folder = tmp_path_factory.mktemp("tree")
    told = import_here(str(saved(value, folder / "file.pt")), str(folder / "in"))
    assert differences(value, returned(pathlib.Path(told["path"]))) == []


@pytest.mark.parametrize(
    ("key", "value", "step"),
    [
        ("step", 3, 3), ("global_step", 4, 4), ("iter_num", 5, 5), ("iteration", torch.tensor(6), 6),
        ("epoch", 7, 7), ("num_updates", np.int64(8), 8), ("step", 9.0, 9), ("meta", {"epoch": 2, "iter": 10}, 10),
        ("step", -1, None), ("step", "12", None), ("step", True, None), ("step", 2**70, None), ("steps_per_s", 3, None),
        ("step", torch.arange(2), None),
    ],
)  # fmt: skip
def test_the_step_is_read_from_the_names_people_use(key, value, step, tmp_path):
    saved({"model": nn.Linear(1, 1).state_dict(), key: value}, tmp_path / "mine.pt")
    told = import_here(str(tmp_path / "mine.pt"), str(tmp_path / "in"))
    assert told["step"] == (step or 0)
    missing = "mine.pt contains no step number: step 0 is used. Set it with `--step N`"
    assert (missing in told["notes"]) == (step is None)
    assert ("step 7 is epoch of mine.pt, which has no step" in told["notes"]) == (key == "epoch")


def test_the_step_of_a_name_is_taken_where_no_value_tells_one(tmp_path):
    saved({"model": nn.Linear(1, 1).state_dict()}, tmp_path / "ckpt-000250.pt")
    told = import_here(str(tmp_path / "ckpt-000250.pt"), str(tmp_path / "in"))
    assert (told["step"], told["notes"]) == (
        250, ["step 250 is from the name ckpt-000250.pt: the file has no step"],
    )  # fmt: skip
    assert import_here(str(tmp_path / "ckpt-000250.pt"), str(tmp_path / "in"), step=7)["step"] == 7


def trainer_folder(folder):
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    saved(optimizer.state_dict(), folder / "optimizer.pt")
    saved(scheduler.state_dict(), folder / "scheduler.pt")
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    for rank in range(2):
        saved(state, folder / f"rng_state_{rank}.pth")
    history = {"epoch": 1.0, "global_step": 500, "log_history": [{"loss": math.nan, "step": 1}], "is_hyper": None}
    (folder / "trainer_state.json").write_text(json.dumps(history, indent=2, sort_keys=True) + "\n")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 3, "rope": {"theta": 1e4}}, indent=2) + "\n")
    (folder / "training_args.bin").write_bytes(b"PK, of a class of theirs")
    (folder / "vocab.txt").write_text("a\nb\n")
    return folder


def accelerate_folder(folder):
    model, optimizer = trained()
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    save_file(nn.Linear(2, 2).state_dict(), folder / "model_1.safetensors", metadata={"format": "pt"})
    saved(optimizer.state_dict(), folder / "optimizer.bin")
    saved(optimizer.state_dict(), folder / "optimizer_1.bin")
    saved({"last_epoch": 3, "_last_lr": [0.1]}, folder / "scheduler.bin")
    saved({"scale": 65536.0, "_growth_tracker": 0}, folder / "scaler.pt")
    saved({"seen": 40, "step": 20}, folder / "custom_checkpoint_0.pkl")
    saved({"step": 0, "random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()},
          folder / "random_states_0.pkl")  # fmt: skip
    return folder


def test_a_trainer_folder_is_taken_whole_or_told_and_comes_back(tmp_path):
    there = trainer_folder(tmp_path / "checkpoint-500")
    told = import_here(str(there), str(tmp_path / "in"))
    assert (told["format"], told["step"]) == ("trainer", 500)
    assert set(told["entries"]) == {
        *("model", "optimizer", "scheduler", "rng_state_0", "rng_state_1", "trainer_state", "config")
    }  # fmt: skip
    assert {part["name"] for part in told["left_out"]} == {"training_args.bin", "vocab.txt"}
    assert any(note.startswith("left out training_args.bin: ") for note in told["notes"])
    export_checkpoint(told["path"], tmp_path / "back", format="trainer")
    check_same_folder(there, tmp_path / "back", {"training_args.bin", "vocab.txt"})
    for name in ("trainer_state.json", "config.json"):
        assert (tmp_path / "back" / name).read_text() == (there / name).read_text()


def test_an_accelerate_folder_with_all_its_parts_comes_back(tmp_path):
    there = accelerate_folder(tmp_path / "state")
    told = import_here(str(there), str(tmp_path / "in"))
    assert (told["format"], told["step"], told["left_out"]) == ("accelerate", 20, [])
    assert {n for n, kind in told["entries"].items() if kind == "module"} == {"model", "model_1"}
    export_checkpoint(told["path"], tmp_path / "back", format="accelerate")
    check_same_folder(there, tmp_path / "back", set())


def check_same_folder(there, back, left_out, dtype=None):
    assert {p.name for p in back.iterdir()} == {p.name for p in there.iterdir()} - left_out
    for path in back.iterdir():
        if path.suffix == ".safetensors":
            with safe_open(there / path.name, "pt") as one, safe_open(path, "pt") as other:
                assert one.metadata() == other.metadata(), path.name
            assert differences(load_file(there / path.name), load_file(path), dtype=dtype) == []
        elif path.suffix == ".json":
            assert path.read_text() == (there / path.name).read_text()
        else:
            folders = (there, back)
            one, other = (sharded(f / path.name) if path.is_dir() else unpickled(f / path.name) for f in folders)
            assert differences(one, other, dtype=dtype) == [], path.name


def unpickled(path):
    return torch.load(path, weights_only=False)


def sharded(folder):
    """All of a folder of torch.distributed.checkpoint, as torch's own converter reads it."""
    format_utils.dcp_to_torch_save(
        folder, file := folder.parent.parent / f"{folder.parent.name}-{folder.name}-as-one.pt"
    )
    return unpickled(file)


def lora_folder(folder):
    folder.mkdir()
    save_file({"b": torch.ones(2), "a": torch.randn(3)}, folder / "adapter.safetensors", metadata={"rank": "8"})
    return folder


def dcp_folder(folder):
    model, optimizer = trained()
    app = {"model": dict(model.state_dict()), "optim": by_names(model, optimizer), "lr": [0.1, 1], "name": None}
    dcp.save({"app": app, "step": 30}, checkpoint_id=folder / "dcp", no_dist=True)
    saved({"epoch": 1, "loops": [(1, 2.0)]}, folder / "dcp" / "meta.pt")
    return folder / "dcp"


def fsdp_folder(folder):
    accelerate_folder(folder)
    for file in ("model.safetensors", "optimizer.bin"):
        (folder / file).unlink()
    model, optimizer = trained()
    dcp.save({"model": dict(model.state_dict())}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": by_names(model, optimizer)}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    return folder


MOVED = {
    "safetensors": (lora_folder, "safetensors"),
    "dcp": (dcp_folder, "dcp"),
    "accelerate": (accelerate_folder, "accelerate"),
    "accelerate with FSDP": (fsdp_folder, "accelerate"),
    "trainer": (trainer_folder, "trainer"),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["copied", "converted and copied"])
@pytest.mark.parametrize("kind", MOVED)
def test_every_format_comes_back_from_another_pool_also_after_a_conversion(kind, dtype, tmp_path):
    make, format_name = MOVED[kind]
    there = make(tmp_path / "checkpoint-500")
    told = import_here(str(there), str(tmp_path / "in"))
    left_out = {part["name"] for part in told["left_out"]}
    path = told["path"]
    if dtype is not None:
        path = convert(path, tmp_path / "half", dtype={"float32": "bfloat16"}, on_lossy="allow")["path"]
    moved = copy(path, str(tmp_path / "pool"))["target"]
    export_checkpoint(moved, tmp_path / "back", format=format_name)
    if kind == "dcp":
        assert differences(sharded(there), sharded(tmp_path / "back"), dtype=dtype) == []
        assert differences(*(unpickled(f / "meta.pt") for f in (there, tmp_path / "back")), dtype=dtype) == []
    else:
        check_same_folder(there, tmp_path / "back", left_out, dtype)
    again = import_here(str(tmp_path / "back"), str(tmp_path / "again"), step=told["step"])
    assert (again["entries"], again["left_out"]) == (told["entries"], [])


def test_a_trainer_folder_without_some_parts_says_so(tmp_path):
    there = trainer_folder(tmp_path / "checkpoint-500")
    for name in ("optimizer.pt", "scheduler.pt", "model.safetensors"):
        (there / name).unlink()
    notes = import_here(str(there), str(tmp_path / "in"))["notes"]
    assert {f"the folder has no {part}" for part in ("weights", "optimizer", "scheduler")} <= set(notes)


def test_a_trainer_folder_without_its_state_is_still_one_and_its_name_tells_the_step(tmp_path):
    there = trainer_folder(tmp_path / "checkpoint-500")
    (there / "trainer_state.json").unlink()
    told = import_here(str(there), str(tmp_path / "in"))
    assert (told["format"], told["step"]) == ("trainer", 500)
    assert {"model", "optimizer", "scheduler", "rng_state_0"} <= set(told["entries"])
    assert {"the folder has no trainer_state.json", "step 500 is from the folder's name checkpoint-500"} <= set(
        told["notes"]
    )


def test_models_and_optimizers_within_a_dict_of_the_file_are_entries(tmp_path):
    """As torch's own tutorial saves {"app": AppState(model, optimizer)} with DCP, and a script several networks."""
    model, optimizer = trained()
    app = {"model": dict(model.state_dict()), "optim": by_names(model, optimizer), "seed": 3}
    value = {"app": app, "nets": {"g": dict(model.state_dict()), "d": nn.Linear(2, 2).state_dict()}, "step": 2}
    told = import_here(str(saved(value, tmp_path / "f.pt")), str(tmp_path / "in"))
    assert told["entries"] == {
        "model": "module", "optim": "optimizer", "app": "tree", "nets.g": "module", "nets.d": "module", "extra": "tree",
    }  # fmt: skip
    assert differences(value, returned(pathlib.Path(told["path"]))) == []
    live, same_groups = trained()
    fresh = torch.optim.AdamW([{"params": group["params"]} for group in same_groups.param_groups])
    for tensor in live.state_dict().values():
        tensor.zero_()
    load(told["path"], {"model": live, "optim": fresh})
    assert differences(dict(model.state_dict()), dict(live.state_dict())) == []
    assert differences(optimizer.state_dict()["state"], fresh.state_dict()["state"]) == []


def test_a_folder_of_saves_asks_for_one_of_them(tmp_path):
    for step in (9, 500):
        trainer_folder(tmp_path / f"checkpoint-{step}")
    with pytest.raises(CheckpointError, match=f"{tmp_path} contains 2 saves") as refusal:
        import_here(str(tmp_path), str(tmp_path / "in"))
    assert refusal.value.remedy == f"name one of them, such as {tmp_path / 'checkpoint-500'}"


def test_what_lightning_keeps_beside_a_sharded_checkpoint_is_taken_and_comes_back(tmp_path):
    there = tmp_path / "epoch=1-step=30.ckpt"
    model, optimizer = trained()
    tensors = {"state_dict": dict(model.state_dict()), "optimizer_0": by_names(model, optimizer)}
    meta = {"epoch": 1, "global_step": 31, "loops": {"fit_loop": {"state_dict": {}}}, "lr_schedulers": [{"n": 3}]}
    dcp.save(tensors, checkpoint_id=there, no_dist=True)
    saved(meta, there / "meta.pt")
    told = import_here(str(there), str(tmp_path / "in"))
    assert (told["format"], told["step"], told["left_out"]) == ("dcp", 31, [])
    assert {"model", "optimizer_0", "loops", "lr_schedulers"} <= set(told["entries"])
    export_checkpoint(told["path"], tmp_path / "back.ckpt", format="dcp")
    assert differences(meta, torch.load(tmp_path / "back.ckpt" / "meta.pt")) == []
    blank = {"state_dict": {name: torch.zeros_like(value) for name, value in tensors["state_dict"].items()}}
    dcp.load(blank, checkpoint_id=tmp_path / "back.ckpt", no_dist=True)
    assert differences(tensors["state_dict"], blank["state_dict"]) == []
    export_checkpoint(told["path"], tmp_path / "whole.ckpt", format="torch")
    assert set(torch.load(tmp_path / "whole.ckpt")) == {*tensors, *meta}


def test_what_fsdp_shards_in_a_folder_of_accelerate_is_taken(tmp_path):
    there = tmp_path / "step_60"
    there.mkdir()
    model, optimizer = trained()
    dcp.save({"model": dict(model.state_dict())}, checkpoint_id=there / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": by_names(model, optimizer)}, checkpoint_id=there / "optimizer_0", no_dist=True)
    saved({"last_epoch": 3}, there / "scheduler.bin")
    saved({"step": 0, "torch_manual_seed": torch.get_rng_state()}, there / "random_states_0.pkl")
    told = import_here(str(there), str(tmp_path / "in"))
    assert (told["step"], told["format"]) == (60, "accelerate")
    assert told["entries"] == {
        "model": "module", "optimizer": "optimizer", "scheduler": "tree", "random_states_0": "tree",
    }  # fmt: skip
    assert differences(dict(model.state_dict()), load(told["path"]).state["model"]) == []
    export_checkpoint(told["path"], tmp_path / "back", format="accelerate")
    blank = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    dcp.load(blank, checkpoint_id=tmp_path / "back" / "pytorch_model_fsdp_0", no_dist=True)
    assert differences(dict(model.state_dict()), blank["model"]) == []


def test_models_that_a_hook_saves_into_folders_of_their_own_are_taken(tmp_path):
    """As diffusers trains with Accelerate."""
    there = accelerate_folder(tmp_path / "checkpoint-20")
    for name in ("model.safetensors", "model_1.safetensors", "custom_checkpoint_0.pkl"):
        (there / name).unlink()
    for name in ("unet", "unet_ema"):
        (there / name).mkdir()
        weights = nn.Linear(2, 3).state_dict()
        save_file(weights, there / name / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
        (there / name / "config.json").write_text(json.dumps({"decay": 0.9}, indent=2) + "\n")
        (there / name / "README.md").write_text("mine")
    told = import_here(str(there), str(tmp_path / "in"))
    assert (told["format"], told["step"]) == ("accelerate", 20)
    assert {name for name, kind in told["entries"].items() if kind == "module"} == {"unet", "unet_ema"}
    assert {part["name"] for part in told["left_out"]} == {"unet/README.md", "unet_ema/README.md"}
    back = tmp_path / "back"
    export_checkpoint(told["path"], back, format="accelerate")
    for name in ("unet", "unet_ema"):
        assert {path.name for path in (back / name).iterdir()} == {"diffusion_pytorch_model.safetensors", "config.json"}
        file = "diffusion_pytorch_model.safetensors"
        assert differences(load_file(there / name / file), load_file(back / name / file)) == []
        assert (back / name / "config.json").read_text() == (there / name / "config.json").read_text()


def test_a_link_to_a_folder_of_others_is_not_followed_where_a_job_may_have_left_it(tmp_path):
    secret, there = tmp_path / "secret", accelerate_folder(tmp_path / "state")
    secret.mkdir()
    save_file({"secret": torch.ones(2)}, secret / "model.safetensors")
    dcp.save({"secret": torch.ones(2)}, checkpoint_id=tmp_path / "sharded", no_dist=True)
    (there / "unet").symlink_to(secret)
    (there / "pytorch_model_fsdp_1").symlink_to(tmp_path / "sharded")
    told = import_here(str(there), str(tmp_path / "in"))
    assert told["left_out"] == [
        {"name": name, "reason": "a link to a folder"} for name in ("pytorch_model_fsdp_1", "unet")
    ]
    assert "secret" not in (pathlib.Path(told["path"]) / "MANIFEST.json").read_text()


def test_a_file_of_any_name_comes_back_under_it(tmp_path):
    there = accelerate_folder(tmp_path / "state")
    for name in ("my notes (2).pt", "_ema.pkl", "größe.pt"):
        saved({"n": 1}, there / name)
    told = import_here(str(there), str(tmp_path / "in"))
    assert told["left_out"] == []
    export_checkpoint(told["path"], tmp_path / "back", format="accelerate")
    check_same_folder(there, tmp_path / "back", set())


def test_a_safetensors_file_keeps_its_name_and_its_texts(tmp_path):
    there = tmp_path / "lora"
    there.mkdir()
    save_file({"b": torch.ones(2), "a": torch.zeros(3)}, there / "adapter.safetensors", metadata={"rank": "8"})
    (there / "README.md").write_text("mine")
    told = import_here(str(there), str(tmp_path / "in"))
    assert [part["name"] for part in told["left_out"]] == ["README.md"]
    export_checkpoint(told["path"], tmp_path / "back")
    export_checkpoint(told["path"], tmp_path / "one.safetensors")
    for path in (tmp_path / "back" / "adapter.safetensors", tmp_path / "one.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"rank": "8"}
        assert differences(load_file(there / "adapter.safetensors"), load_file(path)) == []


def indexed(folder, places, files, suffix="safetensors"):
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / name) if suffix == "safetensors" else saved(tensors, folder / name)
    (folder / f"model.{suffix}.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_index_that_names_what_no_file_holds_is_refused_with_the_names(suffix, tmp_path):
    one, two = (f"model-0000{i}-of-00002.{suffix}" for i in (1, 2))
    files = {one: {"a": torch.ones(2), "old": torch.ones(1)}, two: {"c": torch.ones(2)}}
    there = indexed(tmp_path / "m", {"a": one, "b": one, "c": two, "d": two}, files, suffix)
    with pytest.raises(CheckpointError, match="names 2 of 4 tensors that no file has: b, d"):
        import_here(str(there), str(tmp_path / "in"))
    assert not (tmp_path / "in").exists()
    there = indexed(tmp_path / "n", {"a": one, "c": two}, files, suffix)
    told = import_here(str(there), str(tmp_path / "in"))
    assert f"model.{suffix}.index.json does not name 1 tensors that its files have: old" in told["notes"]


def test_a_form_that_a_stranger_wrote_writes_nothing_outside_the_target(tmp_path):
    there = trainer_folder(tmp_path / "checkpoint-500")
    path = pathlib.Path(import_here(str(there), str(tmp_path / "in"))["path"])
    text = json.loads((path / "MANIFEST.json").read_text())
    forms = [
        {"../x.pt": 1}, {"a/../b.json": {}}, {"a/b/c.json": {}}, {"/a.json": {}}, {"a\n.pt": 1},
        {".": {}}, {"x.pt": {"$entry": "none"}}, {"x.pt": {"$entry": ["model"]}},
        {"x.pt": {"$state_dict": 3}}, {"x.pt": {"$dtype": "save"}}, {"x.pt": {"$eval": "1"}},
        {"x.pt": {"$tensor": "none"}}, {"x.safetensors": {}}, {"x.pt": {"$namespace": [1]}}, {"": 1},
        {"x.pt": [{"$entry": "model"}, {"$entry": "model"}]}, {"x.json": {"$bytes": "AA=="}}, {"x": 1},
        {"x": {"$dict": [[1, 2]]}},
    ]  # fmt: skip
    for form in forms:
        text["origin"]["files"] = form
        text["digest"] = manifest_digest(text)
        (path / "MANIFEST.json").write_text(json.dumps(text))
        with pytest.raises(DamagedCheckpoint):
            export_checkpoint(path, tmp_path / "out", format="trainer")
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "x.pt").exists()


def test_a_manifest_without_a_form_is_read_and_exported_as_before(tmp_path):
    value, _ = scripts()["gpt"]
    path = pathlib.Path(import_here(str(saved(value, tmp_path / "f.pt")), str(tmp_path / "in"))["path"])
    text = json.loads((path / "MANIFEST.json").read_text())
    assert "iter_num" in text.pop("origin")["files"]["f.pt"]
    text["digest"] = manifest_digest(text)
    (path / "MANIFEST.json").write_text(json.dumps(text))
    assert read_manifest(path).origin is None
    assert returned(path)["extra"]["iter_num"] == 40


def test_a_checkpoint_of_ours_becomes_a_folder_that_the_trainer_resumes_from(tmp_path):
    from transformers.trainer_callback import TrainerState

    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": True, "extra": {"seed": 1}}
    told = export_checkpoint(save(tmp_path / "own", 9, state).path, tmp_path / "checkpoint-9", format="trainer")
    assert told["notes"] == ["left out: extra: such a folder cannot contain it"]
    assert TrainerState.load_from_json(tmp_path / "checkpoint-9" / "trainer_state.json").global_step == 9
    torch.optim.AdamW(optimizer.param_groups).load_state_dict(torch.load(tmp_path / "checkpoint-9" / "optimizer.pt"))
    scheduler.load_state_dict(torch.load(tmp_path / "checkpoint-9" / "scheduler.pt"))
    random_states = torch.load(tmp_path / "checkpoint-9" / "rng_state.pth", weights_only=False)
    random.setstate(random_states["python"])
    np.random.set_state(random_states["numpy"])
    torch.set_rng_state(random_states["cpu"])
    again = import_here(str(tmp_path / "checkpoint-9"), str(tmp_path / "in"))
    assert (again["format"], again["step"], again["left_out"]) == ("trainer", 9, [])
