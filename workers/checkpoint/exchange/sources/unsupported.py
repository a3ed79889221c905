"""Refuse checkpoints that only their own library can merge, with the command that converts them.

Source: deepspeed/runtime/engine.py (_get_ckpt_name, _get_zero_ckpt_name) and zero_to_fp32.py, which it copies beside
its checkpoints; megatron/training/checkpointing.py (get_checkpoint_name).
"""

from pathlib import Path

from workers.errors import CheckpointError

DEEPSPEED = ("*mp_rank_*_states.pt", "layer_*-model_*-model_states.pt")
MEGATRON = ("model_optim_rng.pt", "model_rng.pt")
MERGE = "`python zero_to_fp32.py . weights --safe_serialization`"
PARTITIONS = f"partitions of a DeepSpeed checkpoint; {MERGE} writes their weights"


def has_partitions(folder: Path) -> bool:
    """Check whether partitions of a DeepSpeed checkpoint are in the folder itself."""
    return any(any(folder.glob(pattern)) for pattern in DEEPSPEED)


def check_not_partitioned(source: Path) -> None:
    """Raise CheckpointError if such parts are in the folder or in a folder directly below it."""
    folders = [source, *sorted(path for path in source.iterdir() if path.is_dir() and not path.is_symlink())]
    if any(map(has_partitions, folders)):
        raise CheckpointError(
            f"{source} is a DeepSpeed checkpoint; its partitions can only be merged by DeepSpeed",
            f"run {MERGE} in the folder that contains this script, then import the folder `weights`",
        )
    parts = sorted(part for folder in folders for name in MEGATRON for part in folder.glob(f"mp_rank_*/{name}"))
    if parts:
        raise CheckpointError(
            f"{source} is a Megatron checkpoint in its old format, in {len(parts)} part{'s' * (len(parts) > 1)}",
            "save it again with `--ckpt-format torch_dist` and import its folder `iter_…`, or import one part with "
            f"`--skip-unsupported`: {parts[0]}",
        )
