"""The same model measured in several pools, one after the other since they may share a host, and compared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.errors import NotFound, nearest
from orchestrator import submission
from orchestrator.benchmark.compare import compare

if TYPE_CHECKING:
    from orchestrator.client import Client

Data = dict[str, Any]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Workload:
    """What to measure. Zero, "" and None leave the choice to the benchmark task."""

    entry: str
    working_dir: str = "."
    rounds: int = 0
    batch_size: int = 0
    sample_input: str = ""
    train: bool = True
    level: str = ""
    precision: str = ""


def run(client: "Client", workload: Workload, pools: list[str] | None, progress: Progress) -> Data:
    """The comparison (see compare.py). A job that still runs when this is interrupted is cancelled."""
    done: list[Data] = []
    for pool, kind in targets(client.fleet(), pools):
        if not kind:
            done.append(_without_device(pool))
            continue
        view = submission.submit(client, job_of(workload, pool, kind))
        try:
            done.append(client.wait(view["id"], seen=_Once(progress)))
        except BaseException:
            client.cancel(view["id"])
            raise
    return compare(done)


class _Once:
    """Tells a state when it is new."""

    def __init__(self, progress: Progress):
        self._progress, self._told = progress, ""

    def __call__(self, view: Data) -> None:
        words = f"{view['id']}: {view['state'].lower()}"
        if words != self._told:
            self._told = words
            self._progress(words)


def targets(fleet: Data, pools: list[str] | None) -> list[tuple[str, str]]:
    """(pool, kind) to measure, in the order asked for; kind "" where the pool has no device. Raises NotFound."""
    known = {pool["pool"]: pool["kinds"] for pool in fleet["pools"]}
    for name in pools or []:
        if name not in known:
            raise NotFound(f"no pool {name!r} in fleet {fleet['name']}", nearest(name, list(known)))
    return [(name, kind) for name in pools or known for kind in known[name] or [""]]


def job_of(workload: Workload, pool: str, kind: str) -> Data:
    """The spec of one benchmark job."""
    arguments = {
        "rounds": workload.rounds,
        "sample_input": workload.sample_input,
        "level": workload.level,
    }
    return {
        "name": f"benchmark-{pool}",
        "task": "benchmark",
        "entry": workload.entry,
        "working_dir": workload.working_dir,
        "arguments": {name: value for name, value in arguments.items() if value} | {"train": workload.train},
        "resources": {"accelerators": f"{kind}:1", "pool": pool},
        **({"batch_size": workload.batch_size} if workload.batch_size else {}),
        **({"precision": workload.precision} if workload.precision else {}),
    }


def _without_device(pool: str) -> Data:
    return {"id": "", "pool": pool, "state": "", "result": None, "reason": "it has no device that is ready"}
