"""Load batches onto the device, each rank its share."""

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from workers.devices.backends.base import BaseBackend


class DeviceLoader:
    """Wrap a loader to yield its batches on the device. Other attributes (`dataset`, `batch_size`, …) are the loader's.

    With several ranks, batch i belongs to rank i modulo the number of ranks; the last, incomplete round is skipped, so
    that all ranks make the same number of steps. The batch size is that of one rank. `on_batch` is called per batch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        backend: BaseBackend,
        rank: int,
        world_size: int,
        seed: int,
        on_batch: Callable[[], None] = lambda: None,
    ):
        self._backend = backend
        self._shard = (rank, world_size)
        self._loader = loader
        self._on_batch = on_batch
        self._sharded = world_size == 1 or isinstance(getattr(loader, "sampler", None), DistributedSampler)
        if not self._sharded and isinstance(loader, DataLoader) and _has_batches(loader):
            self._loader, self._sharded = _sharded_loader(loader, rank, world_size, seed), True

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader) if self._sharded else shard_items(self._loader, *self._shard)
        for batch in batches:
            self._on_batch()
            yield self._backend.to_device(batch, non_blocking=True)

    def __len__(self) -> int:
        length: int = len(self._loader)  # type: ignore[arg-type]
        return length if self._sharded else length // self._shard[1]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


def shard_items(items: Iterable[Any], rank: int, world_size: int) -> Iterator[Any]:
    """Yield every `world_size`-th item, starting at index `rank`, from complete rounds only."""
    source = iter(items)
    while len(round_ := list(islice(source, world_size))) == world_size:
        yield round_[rank]


class _SharedBatches:
    """One rank's share of a batch sampler. It selects indices, so no data is loaded for other ranks."""

    def __init__(self, batches: Any, rank: int, world_size: int):
        self._batches, self._rank, self._world_size = batches, rank, world_size
        self.batch_size = getattr(batches, "batch_size", None)

    def __iter__(self) -> Iterator[list[int]]:
        return shard_items(self._batches, self._rank, self._world_size)

    def __len__(self) -> int:
        return len(self._batches) // self._world_size


def _has_batches(loader: DataLoader[Any]) -> bool:
    return loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


def _sharded_loader(loader: DataLoader[Any], rank: int, world_size: int, seed: int) -> DataLoader[Any]:
    """Copy `loader` for one rank. A shuffle without its own generator gets one that is equal on all ranks."""
    batches: Any = copy.copy(loader.batch_sampler)
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        batches.sampler = copy.copy(sampler)
        batches.sampler.generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        loader.dataset,
        batch_sampler=_SharedBatches(batches, rank, world_size),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
