"""Detect ranks that make no progress, and collect their stacks. Standard library only.

A training reports its steps (workers/protocol/rank_progress.py). If it has made some, and then none for `limit_s`,
the Python stacks of the ranks are sampled three times. If no main thread moved or woke up in between, the attempt
hangs. If one moved, the rank does something that is not reported as a step, such as an evaluation, and gets
MOVING_LIMIT_FACTOR times as long. Other tasks are watched only if the job sets a limit: their progress is output, and
CPU time of any process of the attempt.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from cluster.input.untrusted_files import UnreadableFile, open_untrusted
from workers.processes import process_tree
from workers.protocol import lease, rank_progress
from workers.protocol.folders import AttemptFolder
from workers.protocol.rank_progress import SIGNAL, RankProgress

MIN_TIMEOUT_S = 60.0
MIN_STEPS = 5
"""Steps before a training is watched. Until then a rank may compile: XLA does so for each of the first steps."""
P99_FACTOR = 2.0
MOVING_LIMIT_FACTOR = 10
SAMPLES = 3
SAMPLE_S = 1.0
MAX_WAKES_PER_S = 5.0
"""Wake-ups of a main thread that still counts as hanging: some waits poll every few seconds."""
IDLE_CORES = 0.01
MAX_STACK_BYTES = 32 << 10
MAX_PROCESSES = 50


class Hang(NamedTuple):
    """A hang: the rank that is furthest behind, a message, and the stacks of each rank."""

    rank: int
    message: str
    stacks: dict[int, str]


class _StepGap(NamedTuple):
    """Last progress of the ranks that have made steps, time since the newest step, and its limit."""

    beats: dict[int, RankProgress]
    limit_s: float
    silent_s: float

    def ranks_with_steps(self, ranks: Mapping[int, int]) -> dict[int, int]:
        return {pid: rank for pid, rank in ranks.items() if rank in self.beats}


class HangDetector:
    """Watches the ranks of one supervisor. `hang_after_s` 0: the rule for trainings; -1: never."""

    def __init__(self, folder: AttemptFolder, task: str, hang_after_s: float):
        self._folder = folder
        self._counts_steps = task == "train"
        self._hang_after_s = hang_after_s
        self._stacks = _Stacks(folder)
        self._retry_at_s = 0.0
        self._has_output = False
        self._last_active = (lease.now_s(), 0.0)
        self._checked_s = lease.now_s()

    def on_output(self) -> None:
        """Record that a rank wrote output."""
        self._has_output = True

    def check(self, ranks: Mapping[int, int], others: Callable[[], set[int]] = set) -> Hang | None:
        """Check for a hang. Called a few times a second; collecting stacks takes several calls.

        `ranks`: running ranks by pid. `others`: processes of the attempt whose CPU time does not count.
        """
        if not ranks or self._hang_after_s < 0:
            return None
        if self._counts_steps:
            return self._check_steps(ranks)
        return self._check_idle(ranks, others) if self._hang_after_s else None

    def stacks_on_cancel(self, ranks: Mapping[int, int]) -> dict[int, str]:
        """Stacks of a training that is being cancelled, if it made no step for half of the limit; else {}.

        The reason may be a hang that another node detected a moment sooner. Called until the ranks have ended, or until
        there are stacks.
        """
        gap = self._step_gap(ranks) if self._counts_steps and self._hang_after_s >= 0 else None
        if gap is None or gap.silent_s < gap.limit_s / 2 or not self._stacks.sample(gap.ranks_with_steps(ranks), 1):
            return {}
        return self._stacks.by_rank(ranks)

    def _step_gap(self, ranks: Mapping[int, int]) -> "_StepGap | None":
        """Return the time since the last step; None before there are enough steps, and in a pause."""
        beats = {rank: beat for rank in ranks.values() if (beat := rank_progress.read(self._folder.beat(rank)))}
        min_steps = 1 if self._hang_after_s else MIN_STEPS
        active = {rank: beat for rank, beat in beats.items() if beat.steps >= min_steps}
        if not active or any(beat.paused for beat in beats.values()):
            return None
        limit_s = self._hang_after_s or max(MIN_TIMEOUT_S, *(P99_FACTOR * beat.p99_s for beat in active.values()))
        return _StepGap(active, limit_s, lease.now_s() - max(beat.at_s for beat in active.values()))

    def _check_steps(self, ranks: Mapping[int, int]) -> Hang | None:
        gap, now_s = self._step_gap(ranks), lease.now_s()
        if gap is None or not gap.silent_s >= gap.limit_s:
            self._retry_at_s = 0.0
            self._stacks.reset()
            return None
        if now_s < self._retry_at_s or not self._stacks.sample(gap.ranks_with_steps(ranks), SAMPLES):
            return None
        if self._stacks.has_moved(gap.beats) and gap.silent_s < MOVING_LIMIT_FACTOR * gap.limit_s:
            self._retry_at_s = now_s + gap.limit_s
            self._stacks.reset()
            return None
        rank, details = _furthest_behind(ranks, gap.beats)
        message = f"rank {rank} made no step for {gap.silent_s:.0f} s, the limit is {gap.limit_s:.0f} s{details}"
        return Hang(rank, f"{message}; the stacks of all ranks are in their logs", self._stacks.by_rank(ranks))

    def _check_idle(self, ranks: Mapping[int, int], others: Callable[[], set[int]]) -> Hang | None:
        now_s = lease.now_s()
        if now_s - self._checked_s < min(self._hang_after_s / 10, 10.0) and not self._stacks.is_sampling:
            return None
        self._checked_s, (since_s, used_s) = now_s, self._last_active
        members = process_tree.attempt_processes([os.getpid()], self._folder.shared) - others()
        cpu_s = sum(map(process_tree.cpu_s, members))
        active = abs(cpu_s - used_s) > max(IDLE_CORES * (now_s - since_s), 0.03)
        if self._has_output or active:
            self._has_output, self._last_active = False, (now_s, cpu_s)
            self._stacks.reset()
            return None
        if now_s - since_s < self._hang_after_s or not self._stacks.sample(ranks, 1):
            return None
        message = f"no rank printed anything or used CPU time for {now_s - since_s:.0f} s"
        remedy = "the stacks of their processes are in their logs"
        return Hang(min(ranks.values()), f"{message}; {remedy}", self._stacks.by_rank(ranks))


class _Sample(NamedTuple):
    stacks: str
    wakes: int
    at_s: float


class _Stacks:
    """Collects samples of the ranks' stacks."""

    def __init__(self, folder: AttemptFolder):
        self._folder = folder
        self._samples: list[dict[int, _Sample]] = []
        self._offsets: dict[int, int] = {}
        self._signalled_s: float | None = None

    @property
    def is_sampling(self) -> bool:
        return self._signalled_s is not None or bool(self._samples)

    def reset(self) -> None:
        self._samples, self._signalled_s = [], None

    def sample(self, ranks: Mapping[int, int], count: int) -> bool:
        """Take the next step of sampling. Returns True once there are `count` samples."""
        if self._signalled_s is None:
            self._signal_ranks(ranks)
        elif time.monotonic() - self._signalled_s >= SAMPLE_S:
            self._signalled_s = None
            self._samples.append(
                {rank: _Sample(self._read(rank), _wakes(pid), time.monotonic()) for pid, rank in ranks.items()}
            )
        return len(self._samples) >= count

    def _signal_ranks(self, ranks: Mapping[int, int]) -> None:
        """Signal ranks that have created their file. Others have no handler yet: the signal would kill them."""
        self._signalled_s = time.monotonic()
        for pid, rank in ranks.items():
            try:
                self._offsets[rank] = self._folder.stacks(rank).lstat().st_size
            except OSError:
                continue
            process_tree.send(pid, SIGNAL)

    def _read(self, rank: int) -> str:
        """The stacks that a rank wrote since the last signal; "" if it is stopped or cannot write them."""
        try:
            with open_untrusted(self._folder.stacks(rank)) as descriptor:
                return os.pread(descriptor, MAX_STACK_BYTES, self._offsets.get(rank, 0)).decode(errors="replace")
        except (OSError, UnreadableFile):
            return ""

    def has_moved(self, ranks: Mapping[int, RankProgress]) -> bool:
        """Return whether the main thread of any of these ranks moved between samples."""
        return any(
            _has_moved([sample[rank] for sample in self._samples if rank in sample], beat)
            for rank, beat in ranks.items()
        )

    def by_rank(self, ranks: Mapping[int, int]) -> dict[int, str]:
        """Stacks by rank: its Python stacks, else what the kernel shows of its processes."""
        newest = self._samples[-1]
        stacks = {rank: sample.stacks for rank, sample in newest.items()}
        return {rank: stacks.get(rank) or _kernel_stacks(pid) for pid, rank in ranks.items()}


def _has_moved(samples: list[_Sample], beat: RankProgress) -> bool:
    positions = {_main_thread(sample.stacks, beat.thread) for sample in samples}
    first, last = samples[0], samples[-1]
    return len(positions) > 1 or last.wakes - first.wakes > MAX_WAKES_PER_S * (last.at_s - first.at_s)


def _wakes(pid: int) -> int:
    """Voluntary context switches of a process's main thread; 0 if the system does not count them."""
    text = _line(Path(f"/proc/{pid}/task/{pid}/status"), "voluntary_ctxt_switches:")
    return int(text) if text.isdigit() else 0


def _main_thread(dump: str, thread: int) -> str:
    """Frames of one thread in a dump of faulthandler; all of the dump if the thread is not in it."""
    for part in dump.split("\n\n"):
        head, _, frames = part.partition("\n")
        if f"0x{thread:016x} " in f"{head} ":
            return frames
    return dump


def _furthest_behind(ranks: Mapping[int, int], active: Mapping[int, RankProgress]) -> tuple[int, str]:
    """Return the rank that others may wait for, and details: a stopped one, else that with fewest steps."""
    for pid, rank in ranks.items():
        if (status := process_tree.read_status(pid)) and status.is_stopped:
            return rank, f"; a signal has stopped its process {pid}"
    rank = min(active, key=lambda r: (active[r].steps, r))
    beat = active[rank]
    last = f"the last was step {beat.step}, " if beat.step >= 0 else ""
    return rank, f" ({last}99 of 100 steps took at most {beat.p99_s:.2g} s)"


def _kernel_stacks(root: int) -> str:
    """State of a process and its descendants, and where in the kernel each waits, if we may read that."""
    lines = ["no Python stacks; its processes:"]
    for pid in [root, *sorted(process_tree.descendants(root))][:MAX_PROCESSES]:
        folder = Path(f"/proc/{pid}")
        state = _line(folder / "status", "State:")
        command = _text(folder / "cmdline").replace("\0", " ").strip()[:200]
        wait_channel = _text(folder / "wchan")
        location = f", in {wait_channel}" if wait_channel not in ("", "0") else ""
        lines.append(f"  {pid} {command}: {state}{location}, {process_tree.cpu_s(pid):.1f} s of CPU time")
        lines += [f"    {frame}" for frame in _text(folder / "stack").splitlines()[:20]]
    return "\n".join(lines)


def _line(path: Path, name: str) -> str:
    return next((line[len(name) :].strip() for line in _text(path).splitlines() if line.startswith(name)), "")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
