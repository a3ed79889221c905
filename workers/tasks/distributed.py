"""Process group of an attempt: created from torchrun's variables before the user's function, destroyed after it."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from workers.devices.backends.base import BaseBackend

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
MAX_PAUSE = timedelta(days=7)


class RankGroup:
    """Communication among the ranks of one attempt. Objects are sent over gloo, whatever backend tensors use."""

    def __init__(self, rank: int, world_size: int, store: Any = None, control: Any = None):
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self._control = control
        self._barriers = 0

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    def barrier(self) -> None:
        """Wait until all ranks have called this, at most MAX_PAUSE."""
        if not self.is_distributed:
            return
        self._barriers += 1
        key = f"meeting-{self._barriers}"
        if self.store.add(key, 1) == self.world_size:
            self.store.set(f"{key}-all", "")
        self.store.wait([f"{key}-all"], MAX_PAUSE)

    def from_first(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if not self.is_distributed:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._control, device=torch.device("cpu"))
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, ordered by rank, on every rank."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values


@contextmanager
def group(backend: BaseBackend, rank: int, world_size: int) -> Iterator[RankGroup]:
    """Create the process group at MASTER_ADDR:MASTER_PORT. A single rank gets none, because it needs none."""
    if world_size == 1:
        yield RankGroup(rank, world_size)
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=RENDEZVOUS_TIMEOUT)
    backend.init_group(PrefixStore("group", store), rank, world_size, COLLECTIVE_TIMEOUT)
    control = None if backend.collective_backend == "gloo" else dist.new_group(backend="gloo")
    yield RankGroup(rank, world_size, PrefixStore("polyfleet", store), control)
    # Skipped after an error: destroying the group may wait for ranks that never respond. A data-parallel model refers
    # to itself, so it needs a collection; until then it keeps gloo's threads, which abort an exiting interpreter.
    gc.collect()
    dist.destroy_process_group()
