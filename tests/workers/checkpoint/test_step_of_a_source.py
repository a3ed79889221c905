"""The step of what is imported: wherever a source has it, in values, texts or names; else the import says how to give
one."""

import argparse
import json
import shutil
from enum import Enum

import pytest
import torch
from lazy_modules import LazyModule
from safetensors.torch import save_file
from torch import nn

from workers.checkpoint import export_checkpoint
from workers.checkpoint.exchange.importer import import_here

dcp = LazyModule("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHTS = nn.Linear(2, 3).state_dict()
NONE = "contains no step number: step 0 is used. Set it with `--step N`"


def indexed(folder, suffix, write):
    file = f"model-00001-of-00001.{suffix}"
    write(folder / file)
    (folder / f"model.{suffix}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, file)}))


def saved_safetensors(path):
    save_file(WEIGHTS, path, metadata={"format": "pt"})


def saved_torch(path):
    torch.save(WEIGHTS, path)


FOLDERS = {
    "model.safetensors": lambda folder: saved_safetensors(folder / "model.safetensors"),
    "adapter_model.safetensors": lambda folder: saved_safetensors(folder / "adapter_model.safetensors"),
    "safetensors with an index": lambda folder: indexed(folder, "safetensors", saved_safetensors),
    "pytorch_model.bin": lambda folder: saved_torch(folder / "pytorch_model.bin"),
    "adapter_model.bin": lambda folder: saved_torch(folder / "adapter_model.bin"),
    "bin with an index": lambda folder: indexed(folder, "bin", saved_torch),
    "dcp": lambda folder: dcp.save({"model": WEIGHTS}, checkpoint_id=folder, no_dist=True),
}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize(
    ("name", "step"), [("checkpoint-500", 500), ("step_0040", 40), ("iter_0000010", 10), ("run-7", None)]
)
def test_the_name_of_a_folder_tells_the_step_where_its_files_do_not(kind, name, step, tmp_path):
    (tmp_path / name).mkdir()
    FOLDERS[kind](tmp_path / name)
    told = import_here(str(tmp_path / name), str(tmp_path / "in"))
    assert told["step"] == (step or 0)
    expected = f"step {step} is from the name {name}: the folder has no step" if step else f"{name} {NONE}"
    assert expected in told["notes"]
    assert import_here(str(tmp_path / name), str(tmp_path / "in"), step=7)["step"] == 7


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_without_a_step_has_that_of_its_own_name_or_of_its_folder(kind, tmp_path):
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    FOLDERS[kind](folder)
    told = import_here(str(folder / kind), str(tmp_path / "in"))
    assert told["step"] == 500
    assert "step 500 is from the name checkpoint-500: the file has no step" in told["notes"]
    own = folder / f"lora-step80{(folder / kind).suffix}"
    shutil.copy(folder / kind, own)
    told = import_here(str(own), str(tmp_path / "in"))
    assert (told["step"], f"step 80 is from the name {own.name}: the file has no step" in told["notes"]) == (80, True)


def test_a_folder_that_is_named_by_a_dot_has_its_name(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    saved_safetensors(folder / "model.safetensors")
    monkeypatch.chdir(folder)
    assert import_here(".", str(tmp_path / "in"))["step"] == 500


@pytest.mark.parametrize(
    ("metadata", "step"),
    [
        ({"step": "12"}, 12), ({"global_step": "13", "epoch": "2"}, 13), ({"ss_steps": "1600", "ss_epoch": "8"}, 1600),
        ({"epoch": "3"}, 3), ({"step": "-1"}, None), ({"step": "1e3"}, None), ({"step": "٣"}, None),
        ({"step": "9" * 30}, None), ({"steps_per_s": "4"}, None), (None, None),
    ],
)  # fmt: skip
def test_the_texts_of_a_safetensors_header_tell_the_step(metadata, step, tmp_path):
    save_file(WEIGHTS, tmp_path / "lora.safetensors", metadata=metadata)
    told = import_here(str(tmp_path / "lora.safetensors"), str(tmp_path / "in"))
    assert told["step"] == (step or 0)
    assert (f"lora.safetensors {NONE}" in told["notes"]) == (step is None)
    assert ("step 3 is epoch of lora.safetensors, which has no step" in told["notes"]) == (metadata == {"epoch": "3"})


class ModelType(Enum):
    """Stands for Megatron's, which is in the args of each of its checkpoints."""

    encoder_or_decoder = 1


def torch_dist(folder, **args):
    """As Megatron's `--ckpt-format torch_dist` writes it, on one rank."""
    dcp.save({"decoder.weight": torch.ones(2, 2), "optimizer.step": 4}, checkpoint_id=folder, no_dist=True)
    common = {"args": argparse.Namespace(lr=0.1, **args), "iteration": 4, "opt_param_scheduler": {"num_steps": 8}}
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return folder


def test_what_megatron_keeps_beside_its_shards_is_taken_and_comes_back(tmp_path):
    there = torch_dist(tmp_path / "run")
    told = import_here(str(there), str(tmp_path / "in"))
    assert (told["format"], told["step"]) == ("dcp", 4)
    assert told["left_out"] == [{"name": "metadata.json", "reason": "it says which library wrote the folder"}]
    export_checkpoint(told["path"], tmp_path / "back", format="dcp")
    common = torch.load(tmp_path / "back" / "common.pt", weights_only=False)
    assert (common["iteration"], common["args"], [*common]) == (
        4, argparse.Namespace(lr=0.1), ["args", "iteration", "opt_param_scheduler"],
    )  # fmt: skip
    export_checkpoint(told["path"], tmp_path / "one.pt", format="torch")
    assert torch.load(tmp_path / "one.pt", weights_only=False)["opt_param_scheduler"] == {"num_steps": 8}


def test_of_megatrons_args_what_cannot_be_imported_is_left_out_by_name(tmp_path):
    there = torch_dist(tmp_path / "run", model_type=ModelType.encoder_or_decoder)
    told = import_here(str(there), str(tmp_path / "in"))
    assert told["step"] == 4
    name, reason = told["left_out"][0].values()
    assert name == "common.pt/args/model_type" and reason.endswith("ModelType")
    assert f"left out {name}: {reason}" in told["notes"]
    export_checkpoint(told["path"], tmp_path / "back", format="dcp")
    args = torch.load(tmp_path / "back" / "common.pt", weights_only=False)["args"]
    assert args == argparse.Namespace(lr=0.1, model_type=None)


@pytest.mark.parametrize("where", ["", "pytorch_model_fsdp_0"])
def test_a_file_of_shards_that_the_metadata_do_not_name_is_left_out_by_name(where, tmp_path):
    there = tmp_path / "run"
    dcp.save({"model": WEIGHTS}, checkpoint_id=there / where, no_dist=True)
    if where:
        dcp.save({"optimizer": {"state": {}, "param_groups": []}}, checkpoint_id=there / "optimizer_0", no_dist=True)
        torch.save({"step": 0}, there / "random_states_0.pkl")
    (there / where / "__7_0.distcp").write_bytes(b"of another save")
    (there / where / "notes.txt").write_text("mine")
    told = import_here(str(there), str(tmp_path / "in"))
    prefix = f"{where}/" if where else ""
    reason = "the .metadata beside it does not name this file: it belongs to another save"
    assert told["left_out"] == [
        {"name": f"{prefix}__7_0.distcp", "reason": reason},
        {"name": f"{prefix}notes.txt", "reason": "it is not part of the checkpoint"},
    ]
