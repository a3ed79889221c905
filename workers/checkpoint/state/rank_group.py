"""Ranks that save one checkpoint: they exchange JSON through the process group's store, never pickled objects."""

import itertools
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch import nn

from cluster.errors import PolyfleetError
from workers.checkpoint.state.sharded import is_sharded
from workers.errors import CheckpointError

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)
"""For the slowest rank to write its shards. A rank that died is noticed sooner by whoever started the ranks."""
_rounds = itertools.count()


class CheckpointRanks:
    """The ranks that take part. Of one rank alone, all of this is free."""

    size, rank = 1, 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gathered(self, value: Any) -> list[Any]:
        """What every rank gave, plain data, by rank, on every rank."""
        return [value]

    def from_first(self, value: T) -> T:
        """What rank 0 gave, on every rank."""
        given: T = self.gathered(value)[0]
        return given

    def all_or_none(self, work: Callable[[], T]) -> T:
        """Every rank works; where one failed, all raise."""
        result, failed = None, None
        try:
            result = work()
        except (PolyfleetError, OSError) as e:
            failed = e
        said = self.gathered("" if failed is None else str(failed))
        if failed is not None:
            raise failed
        for rank, sentence in enumerate(said):
            if sentence:
                raise CheckpointError(f"rank {rank} failed: {sentence}", "nothing was saved")
        return result  # type: ignore[return-value]

    def first_does(self, work: Callable[[], T]) -> "T":
        """Rank 0 works, the others wait and hear of its failure. The result is rank 0's own."""
        return self.all_or_none(work) if self.first else self.all_or_none(_nothing)


class _Many(CheckpointRanks):
    def __init__(self, store: Any, rank: int, size: int):
        self._store, self.rank, self.size = store, rank, size

    def gathered(self, value: Any) -> list[Any]:
        this = next(_rounds)
        self._store.set(f"polyfleet/{this}/{self.rank}", json.dumps(value))
        keys = [f"polyfleet/{this}/{rank}" for rank in range(self.size)]
        self._store.wait(keys, PATIENCE)
        values = [json.loads(self._store.get(key)) for key in keys]
        with suppress(RuntimeError, NotImplementedError):  # all have read the round before the last; some stores keep
            self._store.delete_key(f"polyfleet/{this - 2}/{self.rank}")
        return values


def checkpoint_ranks(state: Mapping[str, Any]) -> CheckpointRanks:
    """All ranks of the default process group where the state holds tensors cut among them; else this one alone."""
    if not cut_among_ranks(state):
        return CheckpointRanks()
    dist: Any = sys.modules["torch.distributed"]
    store = dist.distributed_c10d._get_default_store()
    return _Many(store, dist.get_rank(), dist.get_world_size())


def cut_among_ranks(state: Mapping[str, Any]) -> bool:
    """Whether every rank has a part of its own to save."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return any(_cut(value) for value in state.values())


def _cut(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return any(is_sharded(p) for p in (*value.parameters(), *value.buffers()))
    if isinstance(value, dict):
        return any(map(_cut, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_cut, value))
    return is_sharded(value)


def _nothing() -> Any:
    return None  # which nobody but rank 0 looks at
