"""Ranks that save one checkpoint together. They exchange JSON through the process group's store, never pickles."""

import itertools
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch import nn

from cluster.errors import PolyfleetError
from workers.checkpoint.tensors.sharded import is_sharded
from workers.errors import CheckpointError

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)
"""Time for the slowest rank to write its shards. The launcher of the ranks notices a dead rank sooner."""
_rounds = itertools.count()


class CheckpointRanks:
    """The ranks that save. With a single rank, none of its methods communicates."""

    size, rank = 1, 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Exchange plain data: return the values of all ranks, by rank, on every rank."""
        return [value]

    def from_first(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        first: T = self.gather(value)[0]
        return first

    def check_all_ranks(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it fails on one, raise on all."""
        result, error = None, None
        try:
            result = work()
        except (PolyfleetError, OSError) as e:
            error = e
        messages = self.gather("" if error is None else str(error))
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message:
                raise CheckpointError(
                    f"rank {rank} failed: {message}", "nothing was saved: fix the cause, then save again"
                )
        return result  # type: ignore[return-value]

    def run_on_first(self, work: Callable[[], T]) -> "T":
        """Run `work` on rank 0 while the others wait; all raise if it fails. Only rank 0 gets the result."""
        return self.check_all_ranks(work) if self.first else self.check_all_ranks(_do_nothing)


class _RankGroup(CheckpointRanks):
    def __init__(self, store: Any, rank: int, size: int):
        self._store, self.rank, self.size = store, rank, size

    def gather(self, value: Any) -> list[Any]:
        number = next(_rounds)
        self._store.set(f"polyfleet/{number}/{self.rank}", json.dumps(value))
        keys = [f"polyfleet/{number}/{rank}" for rank in range(self.size)]
        self._store.wait(keys, TIMEOUT)
        values = [json.loads(self._store.get(key)) for key in keys]
        with suppress(
            RuntimeError, NotImplementedError
        ):  # every rank has read the round before the last; not all stores can delete
            self._store.delete_key(f"polyfleet/{number - 2}/{self.rank}")
        return values


def checkpoint_ranks(state: Mapping[str, Any]) -> CheckpointRanks:
    """Return all ranks of the default process group if the state has sharded tensors, else this one alone."""
    if not is_sharded_state(state):
        return CheckpointRanks()
    dist: Any = sys.modules["torch.distributed"]
    store = dist.distributed_c10d._get_default_store()
    return _RankGroup(store, dist.get_rank(), dist.get_world_size())


def is_sharded_state(state: Mapping[str, Any]) -> bool:
    """Check whether the state is sharded, so that every rank must save its part."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return any(_has_shards(value) for value in state.values())


def _has_shards(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return any(is_sharded(p) for p in (*value.parameters(), *value.buffers()))
    if isinstance(value, dict):
        return any(map(_has_shards, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_shards, value))
    return is_sharded(value)


def _do_nothing() -> Any:
    return None  # only rank 0's result is used
