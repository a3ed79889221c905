"""Convert a trace and its fleet to the controller's types: jobs, nodes, and measured rates."""

from collections.abc import Iterator

from cluster import catalogue
from cluster.types import Device, NodeFacts
from orchestrator.core.jobs.fold import Record, apply, submitted
from orchestrator.core.model import Candidate, DeclaredWork, Job
from orchestrator.core.throughput import Key, Measured, Throughput
from orchestrator.simulation.fleets import HOUR_S, Fleet
from orchestrator.simulation.traces import Trace
from workers.protocol.messages import PROTOCOL

GIB = 1 << 30
STORAGE = "/store"
PRECISION = "fp32"


def node_names(fleet: Fleet) -> Iterator[tuple[str, str, int]]:
    """(node, kind, devices) of each node."""
    for number, kind in enumerate(fleet.kinds):
        for index, size in enumerate(fleet.sizes(number)):
            yield f"{kind}-{index}", kind, size


def with_backend(kind: str) -> str:
    """Add a backend to a kind of a trace, as the controller's kinds have one."""
    return kind if catalogue.is_backend(kind.partition(":")[0]) else f"nvidia:{kind}"


def facts(node: str, kind: str, devices: int) -> NodeFacts:
    """Facts of a node as its agent sends them. All nodes share one storage."""
    full_kind = with_backend(kind)
    backend = full_kind.partition(":")[0]
    node_devices = tuple(Device(backend, full_kind, index, kind, total_memory_bytes=GIB) for index in range(devices))
    return NodeFacts(
        node=node,
        ray_node_id=f"ray-{node}",
        host=node,
        address="10.0.0.1",
        pool=kind,
        backend=backend,
        environment=kind,
        protocol=PROTOCOL,
        versions={},
        devices=node_devices,
        cpu_count=1,
        memory_total_bytes=GIB,
        memory_free_bytes=GIB,
        load_1min=0.0,
        disk_free_bytes=GIB,
        agent_pid=1,
        storage=STORAGE,
        storage_id="one",
    )


class TraceJobs:
    """The trace's jobs.

    `throughput` is per device, so that a gang has the trace's rate. Jobs with equal rates are one workload.
    """

    def __init__(self, trace: Trace, fleet: Fleet):
        self.trace, self.fleet = trace, fleet
        self._sizes = [list(fleet.sizes(number)) for number in range(len(fleet.kinds))]
        self._names: dict[tuple[object, ...], str] = {}
        self._rows: dict[Key, Measured] = {}
        self._workload_of = [self._workload(job) for job in range(trace.jobs)]
        self.throughput = Throughput(self._rows)

    def record(self, job: int) -> Record:
        """The job's record in the store after its submission."""
        record = apply(None, submitted(self._job(job), {}, float(self.trace.arrival_s[job])))
        assert record is not None
        return record

    def _workload(self, job: int) -> str:
        gang, rates = int(self.trace.gang[job]), self.trace.rate[:, job]
        key = (gang, *rates.tolist())
        if key not in self._names:
            name = self._names[key] = f"w{len(self._names)}"
            for kind, rate in zip(self.fleet.kinds, rates.tolist(), strict=True):
                if rate:
                    per_device = rate / gang
                    self._rows[name, "train", with_backend(kind), PRECISION] = Measured(
                        per_device, per_device, per_device, "step", "trace", 0.0
                    )
        return self._names[key]

    def _job(self, job: int) -> Job:
        rates = self.trace.rate[:, job]
        best = int(rates.argmax())
        hours = float(self.trace.steps[job] / rates[best]) * int(self.trace.gang[job]) / HOUR_S
        return Job(
            id=f"j{job}",
            name=f"j{job}",
            task="train",
            candidates=tuple(self._candidates(job)),
            objective="throughput",
            workload=self._workload_of[job],
            submitted_s=float(self.trace.arrival_s[job]),
            priority=0 if self.trace.priority is None else int(self.trace.priority[job]),
            work=DeclaredWork(hours=hours, on=with_backend(self.fleet.kinds[best])),
            number=job + 1,
        )

    def _candidates(self, job: int) -> Iterator[Candidate]:
        """Yield a candidate for each division of the gang among nodes, with the kinds that need that division."""
        kinds_by_division: dict[tuple[int, int], list[str]] = {}
        for number, kind in enumerate(self.fleet.kinds):
            if self.trace.rate[number, job]:
                kinds_by_division.setdefault(_divide(int(self.trace.gang[job]), self._sizes[number]), []).append(
                    with_backend(kind)
                )
        for (count, nodes), kinds in kinds_by_division.items():
            yield Candidate(tuple(kinds), count, count, nodes)


def _divide(gang: int, sizes: list[int]) -> tuple[int, int]:
    """Return (devices on each node, nodes) with the fewest nodes that all have the same device count."""
    for count in range(min(gang, max(sizes)), 0, -1):
        if gang % count == 0 and sum(size >= count for size in sizes) >= gang // count:
            return count, gang // count
    return 1, gang
