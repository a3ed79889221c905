"""Create an attempt's folder with everything that its supervisor needs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from cluster.errors import UserError
from cluster.input.checkpoint_location import path_error
from workers.attempt.rank_environment import rank_environment
from workers.attempt.rank_variables import work_rank
from workers.attempt.supervision.rank_log import LIMIT_BYTES
from workers.attempt.supervision.supervisor_handle import STOP_BYTES
from workers.checkpoint.saving.commit_guard import rename_unfinished_saves
from workers.processes import cgroup
from workers.processes.interpreter import has, interpreter
from workers.protocol import lease, reserved_files
from workers.protocol.folders import AttemptFolder, write_json
from workers.protocol.messages import Order
from workers.protocol.output_folder import limit, output_path
from workers.storage import folder_removal
from workers.storage.code_archives import NodeCodeArchives
from workers.storage.data_cache import link

LOG_LIMIT_VARIABLE = "POLYFLEET_LOG_LIMIT_BYTES"
MIN_LOG_BYTES = 1 << 20
RANK_ARGUMENTS = ("-P", "-m", "workers.tasks.rank_main")
RESERVED_BYTES = {"stop": STOP_BYTES, "started": 32, "outcome": 64 << 10, "result": 64 << 10}
"""Bytes reserved for files that must be written even on a full disk, by attribute name of AttemptFolder."""


def resolve_paths(order: Order, storage: Path) -> Order:
    """Make the order's checkpoint folders absolute paths.

    Raises UserError for one that is not below `storage`.
    """

    def absolute_path(path: str) -> str:
        if not path:
            return ""
        relative_path = path.removeprefix(f"{storage}/")
        if path_error(relative_path):
            raise UserError(
                f"checkpoint folder {path!r} is not below this pool's storage", "write its path relative to the storage"
            )
        return str(storage / relative_path)

    return replace(
        order, checkpoint_root=absolute_path(order.checkpoint_root), resume_from=absolute_path(order.resume_from)
    )


class NodeContext(NamedTuple):
    """Properties of the node that every attempt needs.

    `fences`: the server's folder of fences, if the node can read it; `interface`: the network interface with the node's
    address.
    """

    node: str
    code_archives: NodeCodeArchives
    fences: Path | None
    environ: Mapping[str, str]
    interface: str = ""


def create_folder(
    folder: AttemptFolder,
    order: Order,
    context: NodeContext,
    threads: int,
    requested_s: float,
    data: Mapping[str, tuple[Path, Path]] = MappingProxyType({}),
) -> None:
    """Write everything that a supervisor needs: the user's files, order, launch record and first lease.

    The lease starts at `requested_s`. `data`: path and lock of the order's data, by SHA-256.
    """
    folder_removal.remove(folder.shared)
    folder.shared.parent.mkdir(mode=0o700, exist_ok=True)
    folder.shared.mkdir(mode=0o700)
    folder.works.mkdir(mode=0o700)
    for rank in sorted({work_rank(order, local) for local in range(order.ranks)}):
        folder.work(rank).mkdir(mode=0o700)
        if order.code_archive:
            context.code_archives.unpack(order.code_archive, folder.work(rank))
        link(folder.work(rank), order.data, data)
    if order.checkpoint_root:
        root = Path(order.checkpoint_root)
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if order.node_rank == 0:
            rename_unfinished_saves(root)
        output_path(root, order.epoch).mkdir(exist_ok=True, mode=0o700)
    write_json(folder.order, order.to_plain())
    write_json(folder.shared_order, order.to_plain())
    locks = sorted(str(lock) for _, lock in data.values())
    write_json(folder.launch, launch_record(folder, order, context, threads) | {"data_locks": locks})
    for path, size_bytes in RESERVED_BYTES.items():
        reserved_files.reserve_space(getattr(folder, path), size_bytes)
    lease.write(folder.lease, order.lease_s, requested_s)


def launch_record(folder: AttemptFolder, order: Order, context: NodeContext, threads: int) -> dict[str, Any]:
    environ = context.environ
    command = list(order.command) if order.task == "run" else [interpreter(environ), *RANK_ARGUMENTS]
    return {
        "task": order.task,
        "node": context.node,
        "fences": str(context.fences or ""),
        "checkpoint_root": order.checkpoint_root if order.nodes == 1 else "",
        "grace_s": order.grace_s,
        "hang_after_s": order.hang_after_s,
        "log_limit_bytes": log_limit_bytes(environ),
        "output": str(output_path(Path(order.checkpoint_root), order.epoch)) if order.checkpoint_root else "",
        "output_limit": list(limit(order.output_limit_bytes, environ)),
        "cgroup": str(_create_group(folder, environ) or ""),
        "ranks": [
            {
                "rank": order.first_rank + local,
                "command": command,
                "environment": rank_environment(
                    order,
                    local,
                    folder.shared,
                    threads,
                    environ,
                    has_torch_xla=has("torch_xla"),
                    interface=context.interface,
                ),
                "folder": str(folder.work(work_rank(order, local))),
            }
            for local in range(order.ranks)
        ],
    }


def _create_group(folder: AttemptFolder, environ: Mapping[str, str]) -> Path | None:
    """Create the control group of the ranks and return its path; None if there can be none."""
    root = cgroup.find(environ).root
    path = root / cgroup.name(folder.path) if root else None
    return path if root and path and cgroup.ControlGroup(path).create(cgroup.limits(root, environ)) else None


def log_limit_bytes(environ: Mapping[str, str]) -> int:
    """Maximum size of one rank's log on this node. Raises UserError for an invalid setting."""
    text = environ.get(LOG_LIMIT_VARIABLE, str(LIMIT_BYTES))
    if not text.isascii() or not text.isdigit() or not MIN_LOG_BYTES <= int(text[:20]) < 1 << 60:
        raise UserError(
            f"{LOG_LIMIT_VARIABLE} is {text[:40]!r} on this node", f"write a number of bytes, at least {MIN_LOG_BYTES}"
        )
    return int(text)
