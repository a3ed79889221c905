"""Is a verdict right? The same against itself, and against itself with a planted slow-down, quiet and under load.

    python benchmarks/honesty.py [-o FILE] [--comparisons 100]

An arm is one call of so many row norms; the slower one makes 5, 10 or 20 % more of them in each call, so the truth is
known. Each comparison is what the conductor does: rounds in turns, one arm a second time, exact intervals, a verdict.
Load is other processes that compute: on and off for a tenth of a second each, or all the time.

Also: steady-state times against torch.utils.benchmark in the same process, in turns; and what the harness adds to calls
of 10 µs and 10 ms.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from parts import machine
from torch.nn import functional as F  # noqa: N812
from torch.utils.benchmark import Timer as TorchTimer

from workers.benchmark import host
from workers.benchmark.measurement import block_shape, warm_up
from workers.devices import backends
from workers.measurement import statistics
from workers.measurement.statistics import Verdict, verdict
from workers.measurement.timing import Timer

ROUNDS = 12
PRESSURE_S = 10.0
"""So long the kernel's pressure looks back."""
UNITS = 20
PLANTED = {"same": 0, "5 %": 1, "10 %": 2, "20 %": 4}
"""Additional units of a call of 20."""
BUSY = """
import time
while True:
    end = time.monotonic() + 0.1
    while time.monotonic() < end: pass
    time.sleep({})
"""
LOADS = {"quiet": (), "one process on and off": (0.1,), "two processes all the time": (0.0, 0.0)}
Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--comparisons", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(Path.cwd()),
        "torch": torch.__version__,
        "load_average": {"before": machine.load()},
        "rounds": arguments.rounds,
    }
    with backends.create("cpu") as backend:
        timer = Timer(backend)
        found["verdicts"] = {
            name: under_load(timer, load, arguments.comparisons, arguments.rounds) for name, load in LOADS.items()
        }
        found["agreement"] = [agreement(timer, name, call, arguments.rounds + 3) for name, call in calls().items()]
        found["overhead"] = {"empty_block_s": timer.overhead_s} | overhead(timer)
    found["load_average"]["after"] = machine.load()
    show(found)
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


def under_load(timer: Timer, load: tuple[float, ...], comparisons: int, rounds: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    with busy(load):
        time.sleep(PRESSURE_S if comparisons > 1 else 0)
        for name, more in PLANTED.items():
            count = comparisons if more == 0 else max(comparisons // 4, 1)
            results = [compared(timer, more, number, rounds) for number in range(count)]
            told[name] = {
                "comparisons": count,
                "verdicts": dict(Counter(str(one.verdict) for one in results)),
                "on_hosts_called": dict(Counter(one.host for one in results)),
                "median_ratio": median(one.ratio.ratio for one in results),
                "median_noise": median(one.noise for one in results),
                "ratios": [asdict(one.ratio) for one in results],
            }
    return told


@dataclass(frozen=True, slots=True)
class Compared:
    verdict: Verdict
    ratio: statistics.Ratio
    noise: float
    host: str


def compared(timer: Timer, more: int, seed: int, rounds: int) -> Compared:
    """One comparison of a call of 20 units with one of 20 + `more`."""
    before = host.state()
    first, second = norms(UNITS), norms(UNITS + more)
    _, call_s = warm_up(first, timer)
    shape = block_shape(call_s, timer.overhead_s)
    times: dict[str, list[float]] = {"a": [], "again": [], "b": []}
    for number in range(rounds):
        turns: list[tuple[str, Call]] = [("a", first), ("again", first), ("b", second)]
        random.Random(f"{seed}/{number}").shuffle(turns)
        for name, call in turns:
            block = timer.block(call, *shape)
            times[name].append(min(block.parts_s) / block.calls)
    ratio = statistics.paired(times["a"], times["b"])
    noise = statistics.control_noise(statistics.paired(times["a"], times["again"]))
    called = host.classify(before, host.state())["class"]
    return Compared(verdict(ratio, noise, ratio.p <= 0.05, called != "unusable"), ratio, noise, called)


def norms(count: int) -> Call:
    x, weight = torch.randn(64, 1024), torch.ones(1024)

    def call() -> Any:
        with torch.no_grad():
            for _ in range(count):
                out = F.rms_norm(x, (1024,), weight)
        return out

    return call


@contextmanager
def busy(pauses: tuple[float, ...]) -> Iterator[None]:
    children = [subprocess.Popen([sys.executable, "-c", BUSY.format(pause)]) for pause in pauses]
    try:
        time.sleep(0.5 if children else 0)
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def calls() -> dict[str, Call]:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    x, layer = torch.randn(256, 4096), torch.nn.Linear(1024, 1024)
    return {
        "matmul 1024": lambda: a @ b,
        "softmax 256x4096": lambda: x.softmax(-1),
        "linear 1024, batch 64": lambda: layer(a[:64]),
    }


def agreement(timer: Timer, name: str, call: Call, rounds: int) -> dict[str, Any]:
    """Median seconds by both, a block of each by turns."""
    theirs = TorchTimer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    _, call_s = warm_up(call, timer)
    shape = block_shape(call_s, timer.overhead_s)
    ours_s, theirs_s = [], []
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            if which:
                theirs_s.append(theirs.timeit(shape[0] * shape[1]).median)
            else:
                block = timer.block(call, *shape)
                ours_s.append(sum(block.parts_s) / block.calls / len(block.parts_s))
    ratio = statistics.paired(theirs_s, ours_s)
    return {"call": name, "ours_s": median(ours_s), "torch_s": median(theirs_s), "torch_over_ours": ratio.ratio,
            "low": ratio.low, "high": ratio.high}  # fmt: skip


def overhead(timer: Timer) -> dict[str, Any]:
    """Seconds per call that a block adds to calls that only wait: of 10 µs, and of 10 ms."""
    return {f"{name}_added_s": added(timer, seconds) for name, seconds in (("10_us", 10e-6), ("10_ms", 10e-3))}


def added(timer: Timer, seconds: float) -> float:
    """The wait is a busy loop on the same clock: what it overshoots is measured by itself and taken off."""

    def wait() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    calls_, parts = block_shape(seconds, timer.overhead_s)
    alone, timed = [], []
    for _ in range(21):
        begun = time.perf_counter()
        for _ in range(calls_):
            wait()
        alone.append((time.perf_counter() - begun) / calls_)
        timed.append(min(timer.block(wait, calls_, parts).parts_s) / calls_)
    return median(timed) - median(alone)


def show(found: dict[str, Any]) -> None:
    for load, planted in found["verdicts"].items():
        for name, told in planted.items():
            print(f"{load:28} {name:5} {told['verdicts']} {told['on_hosts_called']}  ratio {told['median_ratio']:.3f}"
                  f"  noise {told['median_noise']:.3f}")  # fmt: skip
    for one in found["agreement"]:
        print(f"{one['call']:24} torch/ours {one['torch_over_ours']:.3f} [{one['low']:.3f}, {one['high']:.3f}]")
    print(found["overhead"])


if __name__ == "__main__":
    main()
