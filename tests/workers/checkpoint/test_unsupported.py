"""Checkpoints of DeepSpeed and of Megatron's old format: named as such, with the way to a format that is read."""

import json

import pytest
import torch
from lazy_modules import LazyModule

from workers.checkpoint.exchange.importer import import_here
from workers.errors import CheckpointError

dcp = LazyModule("torch.distributed.checkpoint")
WEIGHTS = {"layer.weight": torch.ones(2, 2)}


def saved(path, value=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"module": WEIGHTS} if value is None else value, path)


DEEPSPEED = {
    "ZeRO-1 or 2, the folder of a step": (
        "global_step10",
        ["global_step10/mp_rank_00_model_states.pt", "global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    ),
    "ZeRO-3, the folder above": (
        "", ["global_step10/zero_pp_rank_0_mp_rank_00_model_states.pt",
             "global_step10/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    ),
    "a pipeline": ("global_step10", ["global_step10/layer_01-model_00-model_states.pt"]),
    "Accelerate with DeepSpeed": (
        "", ["pytorch_model/mp_rank_00_model_states.pt", "random_states_0.pkl", "scheduler.bin"],
    ),
    "the Trainer without gathered weights": ("", ["global_step10/mp_rank_00_model_states.pt", "rng_state_0.pth"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", DEEPSPEED)
def test_partitions_of_deepspeed_are_named_with_the_script_that_merges_them(tmp_path, kind):
    source, names = DEEPSPEED[kind]
    for name in names:
        saved(tmp_path / "run" / name)
    (tmp_path / "run/latest").write_text("global_step10")
    if "Trainer" in kind:
        (tmp_path / "run/trainer_state.json").write_text(json.dumps({"global_step": 10}))
    with pytest.raises(CheckpointError, match=r"DeepSpeed.*; run `python zero_to_fp32\.py \. weights --safe_serial"):
        import_here(tmp_path / "run" / source, tmp_path / "root")


def test_a_folder_of_the_trainer_gives_its_weights_and_names_the_partitions(tmp_path):
    from safetensors.torch import save_file

    source = tmp_path / "checkpoint-10"
    saved(source / "global_step10/mp_rank_00_model_states.pt")
    save_file(WEIGHTS, source / "model.safetensors")
    (source / "trainer_state.json").write_text(json.dumps({"global_step": 10}))
    told = import_here(source, tmp_path / "root")
    [left_out] = [part["reason"] for part in told["left_out"] if part["name"] == "global_step10"]
    assert told["step"] == 10 and "partitions of a DeepSpeed checkpoint" in left_out


@pytest.mark.parametrize("source", ["", "iter_0000010"])
def test_parts_of_megatron_are_named_with_both_ways_out(tmp_path, source):
    for rank in range(2):
        saved(tmp_path / f"run/iter_0000010/mp_rank_0{rank}/model_optim_rng.pt")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("10")
    folder = tmp_path / "run" / source
    with pytest.raises(CheckpointError, match=r"Megatron.* old format, in 2 parts; .*torch_dist.*optim_rng\.pt"):
        import_here(folder, tmp_path / "root")


def test_of_a_folder_of_nothing_that_is_known_the_message_says_what_is_there(tmp_path):
    for name in ("model.onnx", "labels.txt"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"has nothing that can be imported: labels.txt, model.onnx"):
        import_here(tmp_path, tmp_path / "root")


RAY = "TorchTrainer_2026-11-20_08-00-00/checkpoint_2026-11-20_09-30-00.123456"
"""As Ray Train 2.60 names the folders of a run and of a checkpoint; parts have the names of its callbacks."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("level", ["the checkpoint", "the run"])
@pytest.mark.parametrize("part", ["checkpoint.ckpt", "model.pt", "checkpoint", "sharded"])
def test_of_a_folder_of_ray_train_the_part_to_name_is_told_and_is_imported_with_its_step(tmp_path, part, level):
    folder, run = tmp_path / RAY, (tmp_path / RAY).parent
    folder.mkdir(parents=True)
    (folder / ".metadata.json").write_text('{"by": "ray"}')
    (run / "checkpoint_manager_snapshot.json").write_text("{}")
    (run / "checkpoint_2026-11-20_08-30-00.000001").mkdir()
    saved(run / "checkpoint_2026-11-20_08-30-00.000001/model.pt", {"model": WEIGHTS, "step": 1})
    if part == "checkpoint":
        saved(folder / part / "pytorch_model.bin", WEIGHTS)
        (folder / part / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    elif part == "sharded":
        dcp.save({"model": WEIGHTS, "step": 7}, checkpoint_id=folder / part)
    else:
        saved(folder / part, {"model": WEIGHTS, "global_step": 7})
    with pytest.raises(CheckpointError) as raised:
        import_here(folder if level == "the checkpoint" else run, tmp_path / "root")
    assert raised.value.remedy == f"name the part to import, such as {folder / part}"
    assert import_here(folder / part, tmp_path / "root")["step"] == 7
