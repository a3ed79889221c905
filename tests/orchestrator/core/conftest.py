"""A small mixed fleet and short ways to write its parts."""

from dataclasses import replace

import pytest

from orchestrator.core.model import Candidate, Devices, Job, Running, Snapshot

GiB = 2**30


class Words:
    """`w.devices("h100-0", 8)`, `w.job("big", count=8)`: only what a test is about is written down."""

    GiB = GiB

    def devices(self, node, total=1, *, free=None, kind="nvidia:H100-80GB", pool="h100", memory_gib=80, **more):
        numbers = tuple(range(total)) if free is None else tuple(free)
        backend = kind.partition(":")[0]
        had = Devices(f"{node}/{kind}", node, pool, pool, backend, kind, numbers, total, memory_gib * GiB)
        return replace(had, **more)

    def cpu(self, node="cpu-0", total=1, **more):
        return self.devices(node, total, kind="cpu", pool="cpu", **more)

    def ipex(self, node="ipex-0", total=1, **more):
        return self.devices(node, total, kind="cpu:ipex", pool="ipex", **more)

    def xla(self, node="xla-0", total=1, **more):
        return self.devices(node, total, kind="tpu:emulated", pool="xla", emulated=True, **more)

    def v5e(self, node="v5e-0", total=4, **more):
        return self.devices(node, total, **({"kind": "tpu:v5e", "pool": "v5e", "memory_gib": 16} | more))

    def want(self, *kinds, count=1, **more):
        return Candidate(kinds or ("nvidia:H100",), **({"count": count, "min_count": count} | more))

    def job(self, name, *candidates, count=1, **more):
        return Job(name, name, "train", candidates or (self.want(count=count),), **more)

    def running(self, job, *leases, priority=0, order=0, **more):
        return Running(job, priority, order, leases, **more)

    def snapshot(self, devices, jobs, running=(), now_s=100.0, **more):
        return Snapshot(now_s, tuple(devices), tuple(jobs), tuple(running), wall_s=now_s, **more)


@pytest.fixture
def w():
    return Words()
