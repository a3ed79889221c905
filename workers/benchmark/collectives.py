"""Measure all-reduce and all-gather in one island: one process per rank, each with one of this node's devices.

This process is rank 0 and measures the time. The other ranks are child processes that follow it call by call, so that
no rank can run ahead.
"""

import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import workers
from workers.benchmark.cases.case import Case
from workers.benchmark.measurement import PreparedCase, Unsupported, warmed_up
from workers.devices.backends.base import BaseBackend
from workers.devices.backends.device_facts import device_count
from workers.measurement.timing import Timer

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
TIMEOUT = timedelta(seconds=60)


def prepare_collective(case: Case, backend: BaseBackend, timer: Timer) -> PreparedCase:
    ranks = case.sizes["ranks"]
    if backend.device.type != "cpu" and device_count(backend) < ranks:
        raise Unsupported(f"needs {ranks} devices in one node, this session sees {device_count(backend)}")
    if backend.device.type == "xla":
        raise Unsupported("XLA's collectives need one process per device from the start")
    if dist.is_initialized():
        raise Unsupported("this process already belongs to a process group")
    group = _Group(case, backend)
    try:
        first_call_s, is_correct = timer.single_call_s(group.call), group.check()
        accuracy = {"ok": is_correct, "reason": "" if is_correct else "the ranks' sum or parts are wrong"}
        facts = {"accuracy": accuracy, "first_call_s": first_call_s, "collective": backend.collective_backend}
        prepared = warmed_up(group.call, timer, facts)
    except BaseException:
        group.end()
        raise
    prepared.end = group.end
    return prepared


class _Group:
    """Rank 0's side of the group. It broadcasts a signal before each call: 1 continue, 0 end."""

    def __init__(self, case: Case, backend: BaseBackend):
        self._folder = tempfile.TemporaryDirectory(prefix="pf-ranks-")
        store = str(Path(self._folder.name) / "store")
        self._ended = False
        arguments = [case.definition.name, str(case.sizes["bytes"]), str(case.sizes["ranks"]), backend.BACKEND_NAME]
        code = str(Path(workers.__file__).parents[1])
        self._children = [
            subprocess.Popen(
                [sys.executable, "-m", "workers.benchmark.collectives", store, str(rank), *arguments],
                env=os.environ | {"PYTHONPATH": code}, stdin=subprocess.DEVNULL,
            )
            for rank in range(1, case.sizes["ranks"])
        ]  # fmt: skip
        self._rank = _Rank(store, 0, case.definition.name, case.sizes["bytes"], case.sizes["ranks"], backend)

    def call(self) -> torch.Tensor:
        self._rank.send_signal(1)
        return self._rank.communicate()

    def check(self) -> bool:
        actual = self.call()
        expected = self._rank.expected()
        return torch.equal(actual.cpu(), expected)

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._rank.send_signal(0)
        dist.destroy_process_group()
        for child in self._children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._folder.cleanup()


class _Rank:
    def __init__(self, store: str, rank: int, name: str, count: int, ranks: int, backend: BaseBackend):
        self._name, self._ranks = name, ranks
        dist.init_process_group(
            backend.collective_backend,
            store=torch._C._distributed_c10d.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=TIMEOUT,
        )
        part = count // 4 // (ranks if name == "all-gather" else 1)
        self._input = torch.full((part,), float(rank + 1), device=backend.device)
        self._gathered = torch.empty(part * ranks, device=backend.device)
        self._signal = torch.zeros(1, dtype=torch.int32, device=backend.device)

    def send_signal(self, signal: int) -> None:
        self._signal.fill_(signal)
        dist.broadcast(self._signal, 0)

    def receive_signal(self) -> int:
        dist.broadcast(self._signal, 0)
        return int(self._signal)

    def communicate(self) -> torch.Tensor:
        if self._name == "all-gather":
            _gather(self._gathered, self._input)
            return self._gathered
        summed = self._input.clone()
        dist.all_reduce(summed)
        return summed

    def expected(self) -> torch.Tensor:
        if self._name == "all-gather":
            parts = [torch.full((len(self._input),), float(rank + 1)) for rank in range(self._ranks)]
            return torch.cat(parts)
        return torch.full((len(self._input),), float(sum(range(1, self._ranks + 1))))


def main(store: str, rank: str, name: str, count: str, ranks: str, backend: str) -> None:
    from workers.devices import backends

    device_backend = backends.create(backend, 0 if backend == "cpu" else int(rank))
    member = _Rank(store, int(rank), name, int(count), int(ranks), device_backend)
    while member.receive_signal():
        member.communicate()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
