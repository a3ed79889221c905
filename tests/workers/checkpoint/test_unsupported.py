"""Checkpoints of DeepSpeed and of Megatron's old format: named as such, with the way to a format that is read."""

import json

import pytest
import torch

from workers.checkpoint.exchange.importer import import_here
from workers.errors import CheckpointError

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
