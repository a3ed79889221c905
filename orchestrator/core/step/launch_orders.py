"""Build the launch command and the orders for a placement's nodes. Pure."""

from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any

from cluster.catalogue import ray_resource
from cluster.types import NodeFacts
from orchestrator.core.controller.attempts import allocation_name, previous_attempts, ranks_of
from orchestrator.core.controller.commands import Launch
from orchestrator.core.jobs.fold import Record
from orchestrator.core.model import Candidate, Devices, Job, Recovery
from orchestrator.core.timing import PATIENT_LEASE_S
from workers.protocol.messages import Order

SHARES_PER_CPU = 10_000
"""Ray counts resources in ten-thousandths."""

Resources = dict[str, float]

OF_THE_LAUNCH = frozenset({"backend", "nodes", "data", "resume_from"})
"""Fields of an order that are about its node, or set by the launch, although a job has others of the same name."""

ORDER_FIELDS = {f.name for f in fields(Order)} - OF_THE_LAUNCH
COPIED = {kind: tuple(f.name for f in fields(kind) if f.name in ORDER_FIELDS) for kind in (Job, Candidate, Recovery)}
"""Fields that an order takes from the job, its candidate and its recovery as they are."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """One node's part of a placement: its devices, and the facts reported by its agent.

    `cpus`: number of CPUs that Ray allocates there, 0 if unknown.
    """

    devices: Devices
    numbers: tuple[int, ...]
    facts: NodeFacts
    cpus: float = 0.0


def launch_command(record: Record, shares: list[NodeShare], *, fence_is_ours: bool = False) -> Launch:
    """Return the command that launches the newest attempt of `record`. `fence_is_ours`: see controller/commands.py."""
    job, first = record.job, shares[0].devices
    earlier_pools = dict.fromkeys(attempt.pool for attempt in reversed(record.attempts[:-1]))
    return Launch(
        job.id,
        job.epoch,
        tuple(share.devices.node for share in shares),
        orders(record, shares),
        tuple(ray_bundle(share) for share in shares),
        first.pool,
        allocation_name(record.attempts[-1].allocation),
        fence_is_ours,
        job.package,
        job.secrets,
        tuple(earlier_pools),
        record.checkpoint,
        job.resume_from,
        previous_attempts(record.attempts[:-1]),
        waits_for_checkpoint=job.recovery.on_disconnect == "wait",
        data=job.data,
        replicas=record.replicas,
    )


def orders(record: Record, shares: list[NodeShare]) -> tuple[Order, ...]:
    """Return one order per node, in rank order. The launch adds the rendezvous address and the checkpoint later."""
    want = record.candidate_of(record.attempts[-1])
    ranks = [ranks_of(record.job.task, want.launch, len(share.numbers)) for share in shares]
    common = _common_fields(record) | {"world_size": sum(ranks), "master_address": "", "master_port": 0}
    if want.whole_batch:
        common["batch_size"] //= sum(ranks)
    return tuple(
        Order(
            **common,
            **_node_fields(share, record.job.id),
            node_rank=i,
            nodes=len(shares),
            first_rank=sum(ranks[:i]),
            ranks=ranks[i],
        )
        for i, share in enumerate(shares)
    )


def _node_fields(share: NodeShare, job_id: str) -> dict[str, Any]:
    return {
        "backend": share.devices.backend,
        "kind": share.devices.kind,
        "emulated": share.devices.emulated,
        "devices": share.numbers,
        "checkpoint_root": str(PurePosixPath(share.facts.storage) / job_id),
    }


def _common_fields(record: Record) -> dict[str, Any]:
    job, attempt = record.job, record.attempts[-1]
    recovery = job.recovery
    return {
        **_copied_fields(job),
        **_copied_fields(record.candidate_of(attempt)),
        **_copied_fields(recovery),
        "job": job.id,
        "epoch": attempt.epoch,
        "code_archive": job.package,
        "lease_s": PATIENT_LEASE_S if recovery.on_disconnect == "wait" else recovery.lease_s,
        "stop_on_nan": recovery.on_events.get("nan") != "ignore",
    }


def _copied_fields(part: Job | Candidate | Recovery) -> dict[str, Any]:
    """Return the fields of a job, or of a part of it, that an order has by the same name."""
    return {name: getattr(part, name) for name in COPIED[type(part)]}


def ray_bundle(share: NodeShare) -> Resources:
    """Return the Ray resources of a share's devices.

    A CPU device is its share of the node's CPUs, rounded down to Ray's unit so that all shares fit. Ray's own number of
    CPUs is used: it may be smaller than the machine's (`ray start --num-cpus`), and Ray would never grant more.
    """
    resource, count = ray_resource(share.devices.backend, share.devices.emulated), len(share.numbers)
    if resource != "CPU":
        return {resource: float(count)}
    each = int(SHARES_PER_CPU * (share.cpus or share.facts.cpu_count)) // max(share.devices.total, 1)
    return {"CPU": each * count / SHARES_PER_CPU}
