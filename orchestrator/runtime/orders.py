"""From a placement to the orders of its nodes. Pure."""

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from orchestrator.core.fold import Record
from orchestrator.core.model import Devices
from orchestrator.runtime.live import Part
from orchestrator.spec import JobSpec
from workers.messages import Order

# A training rank drives one device; the other tasks are one process per node that sees all its leased devices.
SINGLE_RANK = frozenset({"run", "prepare", "benchmark"})


@dataclass(frozen=True)
class Share:
    """One node's part of the placement: where its devices come from, and its storage folder as it sees it."""

    part: Part
    devices: Devices
    storage: str


def ranks_of(task: str, devices: int) -> int:
    return 1 if task in SINGLE_RANK else devices


def orders(
    record: Record, spec: JobSpec, shares: list[Share], master: tuple[str, int], resumed: dict[str, Any] | None
) -> list[Order]:
    """One per node, in rank order. The candidate holds the job's own values where it overrides nothing."""
    ranks = [ranks_of(record.job.task, len(share.part.numbers)) for share in shares]
    common = _common(record, spec) | {"master_address": master[0], "master_port": master[1], "world_size": sum(ranks)}
    return [
        Order(
            **common,
            **_place(share, record.job.id, resumed),
            node_rank=i,
            nodes=len(shares),
            first_rank=sum(ranks[:i]),
            ranks=ranks[i],
        )
        for i, share in enumerate(shares)
    ]


def _place(share: Share, job_id: str, resumed: dict[str, Any] | None) -> dict[str, Any]:
    storage = PurePosixPath(share.storage)
    return {
        "backend": share.devices.backend,
        "kind": share.devices.kind,
        "emulated": share.devices.emulated,
        "devices": share.part.numbers,
        "checkpoint_root": str(storage / job_id),
        "resume_from": str(storage / resumed["path"]) if resumed else "",
    }


def _common(record: Record, spec: JobSpec) -> dict[str, Any]:
    job, attempt = record.job, record.attempts[-1]
    want = job.candidates[attempt.candidate]
    return {
        "job": job.id,
        "epoch": attempt.epoch,
        "task": job.task,
        "entry": spec.entry,
        "command": want.command,
        "arguments": want.arguments,
        "package": record.package,
        "environment": want.environment,
        "keep_checkpoints": spec.checkpoint.keep,
        "precision": want.precision,
        "batch_size": want.batch_size,
        "seed": spec.seed,
        "grace_s": job.recovery.grace_s,
        "lease_s": job.recovery.lease_s,
        "hang_after_s": job.recovery.hang_after_s,
        "stop_on_nan": job.recovery.on_events.get("nan") != "ignore",
    }
