"""Environment variables that describe the launch to a rank.

These are torchrun's (if there is a process per rank), ours, and those without which frameworks would choose other
devices than the allocated ones.
"""

from pathlib import Path

from cluster.catalogue.precision import short_name
from workers.processes.process_tree import MARK
from workers.protocol.messages import Order, ScriptCheckpoint
from workers.protocol.output_folder import output_path

ROLE = "default"
"""torchrun's default role name of ranks."""

TORCHRUN = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"}
    | {"MASTER_PORT", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
)
"""With these, and those of torchrun's agent, a script believes that torchrun has started it."""

MIXED = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}
"""Accelerate's names of precisions."""


def is_torchruns(name: str) -> bool:
    return name in TORCHRUN or name.startswith("TORCHELASTIC_")


def is_node_launch(order: Order) -> bool:
    """Return whether the order is a command that runs once per node, without variables for ranks."""
    return order.task == "run" and order.launch == "node"


def work_rank(order: Order, local_rank: int) -> int:
    """Global rank whose folder this rank uses: a command's ranks on a node share one, as under torchrun."""
    return order.first_rank + (local_rank if order.task != "run" else 0)


def torchrun(order: Order, local_rank: int) -> dict[str, str]:
    """All variables that torchrun sets, except those about its agent's error file and signals.

    Rank 0 creates the store: with TORCHELASTIC_USE_AGENT_STORE it would look for a store of torchrun's agent.
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
    """Polyfleet's own variables: the table in docs/guides/jobs.md, "Commands"."""
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
    return str(output_path(Path(order.checkpoint_root), order.epoch)) if order.checkpoint_root else ""


def _resume_path(order: Order) -> dict[str, str]:
    """Set only if there is a checkpoint to resume from: scripts and shells distinguish unset from empty."""
    checkpoint = ScriptCheckpoint.of(order.task, order.arguments)
    return {"POLYFLEET_RESUME_PATH": f"{_output(order)}/{checkpoint.path}"} if checkpoint and checkpoint.found else {}


def defaults(order: Order, *, has_torch_xla: bool) -> dict[str, str]:
    """Defaults that pool and user may override.

    On a CPU, Accelerate and DeepSpeed look for another device first. If they find none, or find torch-xla installed,
    each rank trains alone on all of the data and exits with 0. torchrun sets the variable of NCCL too.
    """
    variables = {} if is_node_launch(order) else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if order.backend == "cpu":
        variables |= {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
        variables |= {"USE_TORCH_XLA": "0"} if has_torch_xla else {}
    mixed_precision = MIXED.get(short_name(order.precision)) if order.precision else None
    return variables | ({"ACCELERATE_MIXED_PRECISION": mixed_precision} if mixed_precision else {})
