"""Ranks that make no progress, and where they stand. Standard library only.

A training tells its steps (rank_progress.py). Once some were seen, and none comes for `limit_s`, the ranks are asked
for their Python stacks, three times. Main threads that stay where they are, and are not woken up either, are a hang.
Where one moves, something goes on that nobody announced, an evaluation perhaps: it gets PATIENCE times as long. Other
tasks are watched only where the job says how long: what counts is output, and CPU time of any process of the attempt.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from cluster.untrusted_files import UnreadableFile, open_untrusted
from workers.attempt import lease, process_tree, rank_progress
from workers.attempt.folders import AttemptFolder
from workers.attempt.rank_progress import RankProgress

SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + (5 if hasattr(signal, "SIGRTMIN") else 0)
"""Asks a rank of ours for its stacks: one that programs hardly use for themselves."""
LEAST_S = 60.0
LEAST_STEPS = 5
"""Before, a rank may still compile: XLA does so for each of the first steps."""
P99_TIMES = 2.0
PATIENCE = 10
SAMPLES = 3
SAMPLE_S = 1.0
MOST_WAKES_PER_S = 5.0
"""Of a main thread that hangs: some waits look around every few seconds."""
IDLE_CORES = 0.01
MOST_STACK_BYTES = 32 << 10
MOST_PROCESSES = 50


class Hang(NamedTuple):
    """The rank that is furthest behind, what was seen, and where each rank stands."""

    rank: int
    message: str
    stacks: dict[int, str]


class _Still(NamedTuple):
    """The last beats of ranks that have made steps, how long ago the newest came, and how long it may."""

    begun: dict[int, RankProgress]
    limit_s: float
    for_s: float

    def asked(self, ranks: Mapping[int, int]) -> dict[int, int]:
        return {pid: rank for pid, rank in ranks.items() if rank in self.begun}


class HangDetector:
    """Of the ranks that one supervisor runs. `hang_after_s` 0: the rule for trainings, -1: never."""

    def __init__(self, folder: AttemptFolder, task: str, hang_after_s: float):
        self._folder = folder
        self._steps = task == "train"
        self._hang_after_s = hang_after_s
        self._stacks = _Stacks(folder)
        self._again_s = 0.0
        self._output = False
        self._mark = (lease.now_s(), 0.0)
        self._checked_s = lease.now_s()

    def heard(self) -> None:
        """A rank printed something."""
        self._output = True

    def look(self, ranks: Mapping[int, int], others: Callable[[], set[int]] = set) -> Hang | None:
        """`ranks` are those that run, by pid; `others` are processes of the attempt whose work does not count. Called a
        few times a second; stacks take as many calls.
        """
        if not ranks or self._hang_after_s < 0:
            return None
        if self._steps:
            return self._without_steps(ranks)
        return self._idle(ranks, others) if self._hang_after_s else None

    def last_words(self, ranks: Mapping[int, int]) -> dict[int, str]:
        """Of a training that is being cancelled: where its ranks stand, if they made no step for half as long as a hang
        takes. On another node a hang may have been found a moment sooner. Called until they have ended, or told it.
        """
        still = self._still(ranks) if self._steps and self._hang_after_s >= 0 else None
        if still is None or still.for_s < still.limit_s / 2 or not self._stacks.sample(still.asked(ranks), 1):
            return {}
        return self._stacks.told(ranks)

    def _still(self, ranks: Mapping[int, int]) -> "_Still | None":
        """None while a rank has not begun to make steps, or does something that is none."""
        found = {rank: beat for rank in ranks.values() if (beat := rank_progress.read(self._folder.beat(rank)))}
        least = 1 if self._hang_after_s else LEAST_STEPS
        begun = {rank: beat for rank, beat in found.items() if beat.steps >= least}
        if not begun or any(beat.paused for beat in found.values()):
            return None
        limit_s = self._hang_after_s or max(LEAST_S, *(P99_TIMES * beat.p99_s for beat in begun.values()))
        return _Still(begun, limit_s, lease.now_s() - max(beat.at_s for beat in begun.values()))

    def _without_steps(self, ranks: Mapping[int, int]) -> Hang | None:
        still, now = self._still(ranks), lease.now_s()
        if still is None or not still.for_s >= still.limit_s:
            self._again_s = 0.0
            self._stacks.forget()
            return None
        if now < self._again_s or not self._stacks.sample(still.asked(ranks), SAMPLES):
            return None
        if self._stacks.move(still.begun) and still.for_s < PATIENCE * still.limit_s:
            self._again_s = now + still.limit_s
            self._stacks.forget()
            return None
        rank, why = _furthest_behind(ranks, still.begun)
        message = f"rank {rank} made no step for {still.for_s:.0f} s, {still.limit_s:.0f} s is the limit{why}"
        return Hang(rank, f"{message}; the stacks of all ranks are in their logs", self._stacks.told(ranks))

    def _idle(self, ranks: Mapping[int, int], others: Callable[[], set[int]]) -> Hang | None:
        now = lease.now_s()
        if now - self._checked_s < min(self._hang_after_s / 10, 10.0) and not self._stacks.asked:
            return None
        self._checked_s, (since_s, used_s) = now, self._mark
        members = process_tree.tree([os.getpid()], self._folder.shared) - others()
        cpu_s = sum(map(process_tree.cpu_s, members))
        active = abs(cpu_s - used_s) > max(IDLE_CORES * (now - since_s), 0.03)
        if self._output or active:
            self._output, self._mark = False, (now, cpu_s)
            self._stacks.forget()
            return None
        if now - since_s < self._hang_after_s or not self._stacks.sample(ranks, 1):
            return None
        message = f"no rank printed anything or used CPU time for {now - since_s:.0f} s"
        remedy = "where their processes stand is in their logs"
        return Hang(min(ranks.values()), f"{message}; {remedy}", self._stacks.told(ranks))


class _Sample(NamedTuple):
    stacks: str
    wakes: int
    at_s: float


class _Stacks:
    """Asks ranks where they stand, and remembers what they said."""

    def __init__(self, folder: AttemptFolder):
        self._folder = folder
        self._samples: list[dict[int, _Sample]] = []
        self._from: dict[int, int] = {}
        self._asked_s: float | None = None

    @property
    def asked(self) -> bool:
        return self._asked_s is not None or bool(self._samples)

    def forget(self) -> None:
        self._samples, self._asked_s = [], None

    def sample(self, ranks: Mapping[int, int], count: int) -> bool:
        """True once there are `count` samples."""
        if self._asked_s is None:
            self._ask(ranks)
        elif time.monotonic() - self._asked_s >= SAMPLE_S:
            self._asked_s = None
            self._samples.append(
                {rank: _Sample(self._read(rank), _wakes(pid), time.monotonic()) for pid, rank in ranks.items()}
            )
        return len(self._samples) >= count

    def _ask(self, ranks: Mapping[int, int]) -> None:
        """Only those that have made the file, and so know the signal, which would end others."""
        self._asked_s = time.monotonic()
        for pid, rank in ranks.items():
            try:
                self._from[rank] = self._folder.stacks(rank).lstat().st_size
            except OSError:
                continue
            process_tree.send(pid, SIGNAL)

    def _read(self, rank: int) -> str:
        """ "" for a rank that is stopped, or cannot tell."""
        try:
            with open_untrusted(self._folder.stacks(rank)) as descriptor:
                return os.pread(descriptor, MOST_STACK_BYTES, self._from.get(rank, 0)).decode(errors="replace")
        except (OSError, UnreadableFile):
            return ""

    def move(self, ranks: Mapping[int, RankProgress]) -> bool:
        """Whether the main thread of any of these ranks was somewhere else meanwhile."""
        return any(
            _moved([sample[rank] for sample in self._samples if rank in sample], beat) for rank, beat in ranks.items()
        )

    def told(self, ranks: Mapping[int, int]) -> dict[int, str]:
        """By rank: its Python stacks, else what the kernel tells of its processes."""
        last = self._samples[-1]
        known = {rank: sample.stacks for rank, sample in last.items()}
        return {rank: known.get(rank) or _of_the_kernel(pid) for pid, rank in ranks.items()}


def _moved(samples: list[_Sample], beat: RankProgress) -> bool:
    places = {_main_thread(sample.stacks, beat.thread) for sample in samples}
    first, last = samples[0], samples[-1]
    return len(places) > 1 or last.wakes - first.wakes > MOST_WAKES_PER_S * (last.at_s - first.at_s)


def _wakes(pid: int) -> int:
    """How often the main thread of a process has waited for something and gone on; 0 where nobody counts that."""
    text = _line(Path(f"/proc/{pid}/task/{pid}/status"), "voluntary_ctxt_switches:")
    return int(text) if text.isdigit() else 0


def _main_thread(dump: str, thread: int) -> str:
    """Its part of what faulthandler wrote."""
    for part in dump.split("\n\n"):
        head, _, frames = part.partition("\n")
        if f"0x{thread:016x} " in f"{head} ":
            return frames
    return dump


def _furthest_behind(ranks: Mapping[int, int], begun: Mapping[int, RankProgress]) -> tuple[int, str]:
    """The rank that others may wait for, and what is known of it: one that somebody stopped, else the slowest."""
    for pid, rank in ranks.items():
        if (found := process_tree.stat(pid)) and found.stopped:
            return rank, f"; a signal has stopped its process {pid}"
    rank = min(begun, key=lambda r: (begun[r].steps, r))
    beat = begun[rank]
    last = f"the last was step {beat.step}, " if beat.step >= 0 else ""
    return rank, f" ({last}99 of 100 steps took at most {beat.p99_s:.2g} s)"


def _of_the_kernel(root: int) -> str:
    """Of a process and its descendants: state, and where in the kernel each waits, as far as we may know."""
    lines = ["no Python stacks; its processes:"]
    for pid in [root, *sorted(process_tree.descendants(root))][:MOST_PROCESSES]:
        folder = Path(f"/proc/{pid}")
        state = _line(folder / "status", "State:")
        words = _text(folder / "cmdline").replace("\0", " ").strip()[:200]
        waits = _text(folder / "wchan")
        where = f", in {waits}" if waits not in ("", "0") else ""
        lines.append(f"  {pid} {words}: {state}{where}, {process_tree.cpu_s(pid):.1f} s of CPU time")
        lines += [f"    {frame}" for frame in _text(folder / "stack").splitlines()[:20]]
    return "\n".join(lines)


def _line(path: Path, name: str) -> str:
    return next((line[len(name) :].strip() for line in _text(path).splitlines() if line.startswith(name)), "")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
