"""What a rank is told of its launch by variables: torchrun's where it has ranks, ours always, and those without which
frameworks would choose other devices than the leased ones.
"""

from pathlib import Path

from cluster.catalogue.precision import short_name
from workers.attempt.output_folder import folder_of
from workers.attempt.process_tree import MARK
from workers.messages import Order, ScriptCheckpoint

ROLE = "default"
"""torchrun's name for what all its ranks are."""

TORCHRUN = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"}
    | {"MASTER_PORT", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
)
"""These, and those of torchrun's agent, make a script believe that torchrun has started it."""

MIXED = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}
"""What Accelerate calls a precision."""


def is_torchruns(name: str) -> bool:
    return name in TORCHRUN or name.startswith("TORCHELASTIC_")


def is_node_launch(order: Order) -> bool:
    """Whether a command runs once per node, and sees what its user would see there."""
    return order.task == "run" and order.launch == "node"


def work_rank(order: Order, local_rank: int) -> int:
    """The global rank whose folder this rank works in: ranks of a command on a node share one, as under torchrun."""
    return order.first_rank + (local_rank if order.task != "run" else 0)


def torchrun(order: Order, local_rank: int) -> dict[str, str]:
    """All that torchrun tells a rank, but where its agent reads errors and which signals it handles.

    Rank 0 makes the store: with TORCHELASTIC_USE_AGENT_STORE it would look for one that torchrun's agent had made.
    Source: torch.distributed.elastic.agent.server.local_elastic_agent, the same in torch 2.8 and 2.13.
    """
    if is_node_launch(order):
        return {}
    rank, world_size = str(order.first_rank + local_rank), str(order.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(order.ranks),
        "GROUP_RANK": str(order.node_rank),
        "GROUP_WORLD_SIZE": str(order.nodes),
        "ROLE_NAME": ROLE,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": order.master_address,
        "MASTER_PORT": str(order.master_port),
        "TORCHELASTIC_RUN_ID": f"{order.job}.{order.epoch}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def polyfleet(order: Order, local_rank: int, folder: Path) -> dict[str, str]:
    """The table of docs/guides/jobs.md, "Commands"."""
    return {
        MARK: str(folder),
        "POLYFLEET_JOB": order.job,
        "POLYFLEET_EPOCH": str(order.epoch),
        "POLYFLEET_ATTEMPT": f"{order.job}.{order.epoch}",
        "POLYFLEET_RANK": str(order.first_rank + local_rank),
        "POLYFLEET_LOCAL_RANK": str(local_rank),
        "POLYFLEET_WORLD_SIZE": str(order.world_size),
        "POLYFLEET_NODE_RANK": str(order.node_rank),
        "POLYFLEET_NODES": str(order.nodes),
        "POLYFLEET_MASTER_ADDR": order.master_address,
        "POLYFLEET_MASTER_PORT": str(order.master_port),
        "POLYFLEET_BACKEND": order.backend,
        "POLYFLEET_DEVICE_KIND": order.kind,
        "POLYFLEET_DEVICE_COUNT": str(len(order.devices)),
        "POLYFLEET_CHECKPOINT_DIR": order.checkpoint_root,
        "POLYFLEET_RESUME_FROM": order.resume_from,
        "POLYFLEET_OUTPUT_DIR": _output(order),
    } | _resume_path(order)


def _output(order: Order) -> str:
    return str(folder_of(Path(order.checkpoint_root), order.epoch)) if order.checkpoint_root else ""


def _resume_path(order: Order) -> dict[str, str]:
    """Only where there is something to resume from: a shell tells `set` from `empty`, and so do scripts."""
    asked = ScriptCheckpoint.of(order.task, order.arguments)
    return {"POLYFLEET_RESUME_PATH": f"{_output(order)}/{asked.path}"} if asked and asked.found else {}


def defaults(order: Order, *, has_torch_xla: bool) -> dict[str, str]:
    """What pool and user may override.

    On a CPU Accelerate and DeepSpeed look for another device first; where they find none, or find torch-xla installed,
    each rank trains alone on all of the data, and ends with 0. torchrun sets the variable of NCCL in the same way.
    """
    found = {} if is_node_launch(order) else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if order.backend == "cpu":
        found |= {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
        found |= {"USE_TORCH_XLA": "0"} if has_torch_xla else {}
    mixed = MIXED.get(short_name(order.precision)) if order.precision else None
    return found | ({"ACCELERATE_MIXED_PRECISION": mixed} if mixed else {})
