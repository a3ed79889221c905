"""Attempts that may still have processes somewhere: what the controller keeps of them in memory only.

After a restart of the controller they are rebuilt from the log's leases; phases and cursors come back from the agents.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.fold import Record
from orchestrator.core.model import Job
from workers.messages import Failure, Outcome


def node_of(devices_id: str) -> str:
    """`xla-0/tpu:emulated` lies on node `xla-0`."""
    return devices_id.partition("/")[0]


@dataclass
class Part:
    """One node's share. `ended` holds its Outcome as plain data once it ended, or once it is known to be gone.

    `spoiled` is "" or why what its agent told of it cannot be used: it is stopped, and ends as failed.
    """

    node: str
    devices_id: str
    numbers: tuple[int, ...]
    phase: str = ""
    cursor: int = 0
    ended: dict[str, Any] | None = None
    spoiled: str = ""


@dataclass
class Live:
    """`launching` while a thread carries the placement out; `stopping` is "", preempt or cancel once asked.

    `seen_s` (monotonic) is since when its nodes must know it; `told_s` (epoch seconds) the time of rank 0's last event.
    """

    job: str
    epoch: int
    parts: list[Part]
    launching: bool = False
    stopping: str = ""
    seen_s: float = field(default_factory=time.monotonic)
    told_s: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.job}.{self.epoch}"

    @property
    def over(self) -> bool:
        return not self.launching and all(part.ended is not None for part in self.parts)

    @property
    def running(self) -> bool:
        return all(part.phase == "running" for part in self.parts)

    def part_key(self, node_rank: int) -> str:
        return f"{self.key}.{node_rank}"


def live_of(record: Record) -> Live | None:
    """The attempt of `record` that may still hold devices, if there is one."""
    attempt = record.live
    if attempt is None:
        return None
    parts = [Part(node_of(devices_id), devices_id, numbers) for devices_id, numbers in attempt.leases]
    return Live(record.job.id, attempt.epoch, parts)


def lost_outcome(
    job: Job, epoch: int, node_rank: int, node: str, reason: str, state: str = "lost", kind: str = "lost"
) -> dict[str, Any]:
    """The Outcome, as plain data, of a part whose agent tells none, or none that can be used."""
    return Outcome(job.id, epoch, node_rank, state, {}, Failure(0, node, kind, reason)).to_plain()
