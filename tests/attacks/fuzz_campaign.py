"""`make fuzz`: very many mutated inputs for every reader of untrusted bytes, on all cores, at low priority.

    python tests/attacks/fuzz_campaign.py [--inputs 1000000] [--seconds 1500] [--workers N] [--seed S] [--only NAMES]

Each worker is a process with limited memory that reads one target's inputs in turn; one that ends or hangs is replaced
and its input is counted as a failure. Failing inputs are kept below .fuzz/; worth keeping for good are those copied to
tests/attacks/corpus/TARGET/, which are read first. Exit code 1 when anything failed.
"""

import argparse
import hashlib
import logging
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT, CORPUS = ROOT / ".fuzz", HERE / "corpus"
BATCH = 500
MEMORY_BYTES = 2 << 30
"""Address space of a worker beyond what it has when it begins: the guard measures what is used."""
SILENT_S = 30.0
"""A worker tells of each batch, and of each input that takes long; one that does neither hangs in C code."""
STARTING_S = 300.0
"""Some readers' samples need torch, whose import takes long at low priority."""
MOST_KEPT = 20


@dataclass
class Tally:
    """Of one target."""

    wanted: int
    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    slowest_s: float = 0.0
    peak_bytes: int = 0
    seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)


def main() -> int:
    given = _arguments()
    os.nice(19)
    sys.path[:0] = [str(HERE), str(ROOT)]
    from fuzz_targets import TARGETS

    targets = [t for t in TARGETS if not given.only or t.name in given.only.split(",")]
    shares = sum(t.share for t in targets)
    tallies = {t.name: Tally(max(1, round(given.inputs * t.share / shares))) for t in targets}
    until = time.monotonic() + given.seconds
    _run([t.name for t in targets], tallies, given, until)
    _print(tallies, given)
    return 1 if any(t.failures for t in tallies.values()) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all targets together")
    parser.add_argument("--seconds", type=float, default=1500.0, help="then it ends with what there is")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of targets, separated by commas")
    return parser.parse_args()


def _run(names: list[str], tallies: dict[str, Tally], given: argparse.Namespace, until: float) -> None:
    """Each target is one worker's from beginning to end, unless that dies; `waiting` are those without one."""
    waiting, busy = list(names), {}
    while waiting or busy:
        while waiting and len(busy) < given.workers and time.monotonic() < until:
            name = waiting.pop(0)
            worker = _Worker(name, tallies[name], given.seed)
            busy[worker.link] = worker
        if time.monotonic() >= until:
            waiting.clear()
            for worker in busy.values():
                worker.end()
            return
        for link in wait(list(busy), timeout=1.0):
            worker = busy[link]
            if not worker.hear():
                del busy[link]
                waiting += [worker.name] if worker.unfinished else []
        for link, worker in list(busy.items()):
            if time.monotonic() - worker.heard_s > SILENT_S:
                worker.hung()
                del busy[link]
                waiting += [worker.name] if worker.unfinished else []


class _Worker:
    """A process for one target, and the file into which it writes each input before it reads it."""

    def __init__(self, name: str, tally: Tally, seed: int):
        self.name, self.tally = name, tally
        self.heard_s = time.monotonic() + STARTING_S
        self._current = Path(tempfile.mkstemp(prefix="polyfleet-fuzz-")[1])
        context = multiprocessing.get_context("spawn")
        self.link, theirs = context.Pipe(duplex=False)
        told = (name, tally.wanted - tally.inputs, seed + tally.inputs, tally.inputs == 0, self._current, theirs)
        self._process = context.Process(target=_work, args=told, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def unfinished(self) -> bool:
        return self.tally.inputs < self.tally.wanted

    def hear(self) -> bool:
        """Whether it goes on."""
        try:
            told = self.link.recv()
        except EOFError:
            self._process.join(SILENT_S)
            if self.unfinished:
                self._failed(f"the process ended with exit code {self._process.exitcode}")
            self.end()
            return False
        self.heard_s = time.monotonic()
        self.tally.inputs += told["inputs"]
        self.tally.refused += told["refused"]
        self.tally.accepted += told["accepted"]
        self.tally.seconds += told["seconds"]
        self.tally.slowest_s = max(self.tally.slowest_s, told["slowest_s"])
        self.tally.peak_bytes = max(self.tally.peak_bytes, told["peak_bytes"])
        for why, data in told["failures"]:
            _count(self.tally, self.name, why, data)
        return True

    def hung(self) -> None:
        self._failed(f"the reader did not come back within {SILENT_S:.0f} s")
        self.end()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.link.close()
        self._current.unlink(missing_ok=True)

    def _failed(self, why: str) -> None:
        self.tally.inputs += 1
        _count(self.tally, self.name, why, self._current.read_bytes())


def _count(tally: Tally, name: str, why: str, data: bytes) -> None:
    tally.failures[why] = tally.failures.get(why, 0) + 1
    if tally.failures[why] <= MOST_KEPT:
        folder = KEPT / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / f"{hashlib.sha256(data).hexdigest()[:16]}.bin"
        kept.write_bytes(data)
        kept.with_suffix(".txt").write_text(why + "\n")


def _work(name: str, count: int, seed: int, first: bool, current: Path, link: Connection) -> None:
    """In a process of its own: samples and corpus, then `count` mutated inputs, told batch by batch."""
    sys.path[:0] = [str(HERE), str(ROOT)]
    import fuzz_guard
    import fuzz_mutations
    from fuzz_targets import TARGETS

    logging.disable()  # readers say what they refuse
    target = next(t for t in TARGETS if t.name == name)
    with tempfile.TemporaryDirectory(prefix="polyfleet-fuzz-") as sandbox:
        os.environ["POLYFLEET_HOME"] = sandbox
        reading = _Reading(target.read, Path(sandbox), current, link)
        samples = list(target.samples())
        for data in samples:
            reading.load(data)
        _limit_memory()
        reading.tell()
        if first:
            for path in sorted((CORPUS / name.replace(" ", "-")).glob("*.bin")):
                reading.one(path.read_bytes(), fuzz_guard)
        chance = random.Random(f"{name} {seed}")
        for _ in range(count):
            drawn, which = fuzz_mutations.drawn(chance)
            reading.one(fuzz_mutations.mutated(samples, which, drawn), fuzz_guard)
        reading.tell()
        target.close()
    link.close()


class _Reading:
    def __init__(self, read: Any, sandbox: Path, current: Path, link: Connection):
        self._read, self._sandbox, self._link = read, sandbox, link
        self._current = current.open("wb", buffering=0)
        self._base_bytes = 0
        self._clear()

    def load(self, data: bytes) -> None:
        """A valid input, unwatched: what is imported on first use is imported here."""
        try:
            self._read(data, self._sandbox)
        except Exception as e:
            print(f"a sample was refused: {e}", file=sys.stderr)
        self._base_bytes = _peak_bytes()

    def one(self, data: bytes, guard: Any) -> None:
        self._current.truncate(0)
        self._current.seek(0)
        self._current.write(data)
        started_s = time.process_time()
        try:
            self._told[guard.judged(self._read, data, self._sandbox)] += 1
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            self._told["failures"].append((_why(e), data))
        took_s = time.process_time() - started_s
        self._told["inputs"] += 1
        self._told["slowest_s"] = max(self._told["slowest_s"], took_s)
        if self._told["inputs"] >= BATCH or took_s > 1 or time.perf_counter() - self._since_s > SILENT_S / 4:
            self.tell()

    def tell(self) -> None:
        self._told["seconds"] = time.process_time() - self._since_cpu_s if self._told["inputs"] else 0.0
        self._told["peak_bytes"] = max(0, _peak_bytes() - self._base_bytes)
        self._link.send(self._told)
        self._clear()

    def _clear(self) -> None:
        self._since_s, self._since_cpu_s = time.perf_counter(), time.process_time()
        self._told: dict[str, Any] = {"inputs": 0, "refused": 0, "accepted": 0, "slowest_s": 0.0, "failures": []}


def _why(error: BaseException) -> str:
    """The kind of error and where it arose, so that a thousand of a kind are one."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/tests/attacks/" not in f.filename] or frames
    text = str(error)[:120] if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__} {text} in {Path(ours[-1].filename).name}:{ours[-1].lineno}"


def _limit_memory() -> None:
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES, used_bytes + MEMORY_BYTES))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _print(tallies: dict[str, Tally], given: argparse.Namespace) -> None:
    head = ("target", "inputs", "refused", "accepted", "slowest s", "peak MiB", "per CPU s", "failures")
    print("{:20}{:>10}{:>10}{:>10}{:>11}{:>10}{:>10}{:>10}".format(*head))
    for name, t in tallies.items():
        rate = t.inputs / t.seconds if t.seconds else 0
        failed = sum(t.failures.values())
        print(
            f"{name:20}{t.inputs:>10}{t.refused:>10}{t.accepted:>10}{t.slowest_s:>11.3f}{t.peak_bytes >> 20:>10}"
            f"{rate:>10.0f}{failed:>10}"
        )
    inputs, failed = (
        sum(n) for n in zip(*((t.inputs, sum(t.failures.values())) for t in tallies.values()), strict=True)
    )
    print(f"{'all':20}{inputs:>10}{'':51}{failed:>10}   seed {given.seed}")
    for name, t in tallies.items():
        for why, count in sorted(t.failures.items(), key=lambda item: -item[1]):
            print(f"{name}: {count} x {why}")
        if t.inputs < t.wanted:
            print(f"{name}: {t.wanted - t.inputs} inputs were left out when the time was up")
    if failed:
        print(f"failing inputs are below {KEPT}; copy those worth keeping to {CORPUS.relative_to(ROOT)}/TARGET/")


if __name__ == "__main__":
    sys.exit(main())
