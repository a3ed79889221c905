"""Supervisor of one attempt: `python -m workers.attempt FOLDER LOCK`, with secrets as JSON on stdin.

Standard library only, so that it starts in milliseconds and runs in any environment. It detaches itself, with a reaper
as its parent, starts the ranks of launch.json, writes their output to their logs, follows the files `stop` and `lease`,
and writes outcome.json last, when no process of the attempt is left. LOCK is the inherited descriptor of the locked
file `lock`, which stays locked until the supervisor exits.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from cluster.host.file_lock import share_lock
from workers.attempt.supervision import outcome, reaper, supervisor_handle
from workers.attempt.supervision.exec_commands import ExecCommands
from workers.attempt.supervision.hang_detector import Hang, HangDetector
from workers.attempt.supervision.rank_log import RankLog
from workers.attempt.supervision.rank_processes import RankProcesses, RankStartError, block_signals
from workers.attempt.supervision.rank_results import RankResults
from workers.attempt.supervision.supervisor_handle import CANCEL_GRACE_S
from workers.processes import disk_full, process_tree
from workers.processes.oom import OomMonitor
from workers.protocol import lease, rank_progress, reserved_files, wakeup_pipe
from workers.protocol.folders import AttemptFolder, AttemptId, parse, read_json
from workers.protocol.messages import Failure, Outcome
from workers.protocol.output_folder import OutputFolder
from workers.protocol.redaction import Redactor

CHECK_EVERY_S = 0.25
EXIT_CANNOT_START = 127
MAX_TEXT_LENGTH = 64 << 10
SIGNALLED_TOGETHER_S = 1.0
"""Time within which a machine that shuts down, or a cancelled Slurm step, sends SIGTERM to the ranks and to us."""
# What ends an attempt, weakest first: only a stronger reason replaces another.
STRENGTH = {"": 0, "preempt": 1, "failed": 2, "cancel": 3, "fence": 3, "lease": 4}


class FirstFailure(NamedTuple):
    """The rank that failed first, and a description of the disk that was full then ("" for none)."""

    rank: int
    pid: int
    disk: str


class Supervisor:
    """Runs the ranks of one attempt on this node, from their start until no process of the attempt is left.

    `reason` is why the ranks are being stopped ("" while they are not), `kill_at_s` when those that still run are
    killed. `by_group`: signals go to the ranks' process groups.
    """

    def __init__(self, folder: AttemptFolder, attempt: AttemptId, secrets: dict[str, str]):
        self.folder = folder
        self.attempt = attempt
        self.lease = lease.Lease(folder.lease)
        self.launch: dict[str, Any] = read_json(folder.launch)
        self.data = [share_lock(Path(lock)) for lock in self.launch["data_locks"]]  # until this process ends
        self.group = supervisor_handle.cgroup_of_record(self.launch)
        self.redact = Redactor(secrets.values())
        self.results = RankResults(folder, self.redact)
        self.by_group = self.launch["task"] == "run"
        self.memory = OomMonitor(self.group)
        self.outputs = OutputFolder(self.launch["output"], *self.launch["output_limit"])
        self.failure: Failure | None = None
        self.first_failed: FirstFailure | None = None
        self.hang_detector = HangDetector(folder, self.launch["task"], float(self.launch["hang_after_s"]))
        self.ranks = RankProcesses(secrets, self._log, self.hang_detector.on_output)
        self.commands = ExecCommands(self.launch["ranks"], secrets, self._open_group, self.ranks.selector)
        self.lets_saves_finish = False
        self.has_written_stacks = False  # whether the stacks of the ranks were written to their logs
        self.reason = ""
        self.interrupted_ranks: set[int] = set()  # ranks that still ran at the first request to stop
        self.requested_at = float("inf")  # time of that request, by the clock of the ranks' notes
        self.ended_s: dict[int, float] = {}
        self.kill_at_s = float("inf")
        self.checked_s = 0.0

    def run(self) -> None:
        process_tree.reset_priority()
        process_tree.adopt_orphans()
        self._start_all()
        while self.ranks.running or self._command_saves():
            self.ranks.poll(CHECK_EVERY_S)
            self._reap()
            self.ranks.flush()
            if lease.now_s() - self.checked_s >= CHECK_EVERY_S:
                self._check()
            if not self.ranks.running:
                self.commands.kill_all()
        self._kill()
        self.ranks.drain()
        self._finish()

    def _log(self, rank: int) -> RankLog:
        return RankLog(self.folder.log(rank), self.redact, self.launch["log_limit_bytes"])

    def on_signal(self, number: int, _frame: Any) -> None:
        """Handle a signal. SIGTERM: the machine shuts down, ranks may still save. SIGUSR1: the agent wakes us.

        The ranks may have got SIGTERM before us, so one that ended within the last second may have ended because of it.
        """
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._stop_ranks("preempt")
            recent_s = lease.now_s() - SIGNALLED_TOGETHER_S
            self.interrupted_ranks |= {n for n in self.ranks.logs if self.ended_s.get(n, lease.now_s()) > recent_s}
        if number != signal.SIGCHLD:
            self.checked_s = 0.0

    def _start_all(self) -> None:
        """Start all ranks, unless the lease has expired: then a newer attempt may have replaced this one."""
        if self.lease.is_expired():
            self._stop_ranks("lease")
        group = self._open_group()
        for rank in self.launch["ranks"]:
            with block_signals():  # so that a signal comes before a rank's start, or is passed on to the rank
                if not self.reason:
                    self._start(rank, group)
        if group is not None:
            os.close(group)
        if not self.reason:
            with suppress(OSError):  # on a full disk the agent continues to show the attempt as starting
                reserved_files.replace_or_use_reserve(self.folder.started, f"{time.time():.3f}")
            self.commands.open()
            wakeup_pipe.notify(self.folder.path.parent)

    def _open_group(self) -> int | None:
        return self.group.open_folder() if self.group is not None else None

    def _start(self, rank: dict[str, Any], group: int | None) -> None:
        try:
            self.ranks.start(rank, group)
        except RankStartError as e:
            number = rank["rank"]
            self.ranks.codes[number] = EXIT_CANNOT_START
            self.failure = Failure(number, self.launch["node"], "start", e.message, exit_code=EXIT_CANNOT_START)
            self._stop_ranks("failed")

    def _reap(self) -> None:
        for pid, number, code in self.ranks.reap(self.commands.on_exit):
            self._on_exit(pid, number, code)

    def _on_exit(self, pid: int, number: int, code: int) -> None:
        """Record the exit of a rank.

        A failure ends all ranks: they would wait for it in a collective for ever.
        """
        self.ended_s[number] = lease.now_s()
        if code != 0 and not self.reason:
            self.first_failed = FirstFailure(number, pid, disk_full.describe_full_disk(self._disks(number)))
            self._stop_ranks("failed")
            if (self.results.failure(number) or {}).get("kind") == "nan":  # saves that have started may finish
                self.lets_saves_finish, self.kill_at_s = True, lease.now_s() + self.launch["grace_s"]

    def _disks(self, number: int) -> list[str]:
        """Folders that a rank writes to: its own, its checkpoints, temporary files, shared memory."""
        rank = next(rank for rank in self.launch["ranks"] if rank["rank"] == number)
        folders = [rank["environment"].get(name, "") for name in ("POLYFLEET_CHECKPOINT_DIR", "TMPDIR")]
        return [rank["folder"], *filter(None, folders), "/tmp", "/dev/shm"]  # noqa: S108 - only their free space is read

    def _check(self) -> None:
        """Check lease, stop requests, hangs, the output folder's size and deadlines, and act on them."""
        self.checked_s = lease.now_s()
        if self.lease.is_expired():
            self._stop_ranks("lease")
        else:
            self._stop_ranks(supervisor_handle.requested_stop(self.folder.stop))
        if not self.reason and (hang := self.hang_detector.check(self.ranks.running, self.commands.processes)):
            self._fail_as_hang(hang)
        if not self.reason and (refusal := self.outputs.check()):
            self.failure = self._node_failure("storage", refusal)
            self._stop_ranks("failed")
        if (
            self.reason in ("cancel", "fence")
            and not self.has_written_stacks
            and (stacks := self.hang_detector.stacks_on_cancel(self.ranks.running))
        ):
            self._write_stacks(stacks)
        saves = self.lets_saves_finish and any(map(self._is_saving, self.ranks.running.values()))
        if lease.now_s() >= self.kill_at_s or (self.lets_saves_finish and not saves):
            self._kill()
        self.commands.kill_overdue()
        self.memory.sample()

    def _is_saving(self, number: int) -> bool:
        beat = rank_progress.read(self.folder.beat(number))
        return beat is not None and beat.saving

    def _fail_as_hang(self, hang: Hang) -> None:
        """Fail because of a hang, with the stacks of the ranks in their logs and in the failure."""
        text = "\n".join(f"rank {number}:\n{stacks.rstrip()}" for number, stacks in hang.stacks.items())
        self._write_stacks(hang.stacks)
        text = self.redact(text)[:MAX_TEXT_LENGTH]
        self.failure = Failure(hang.rank, self.launch["node"], "hang", hang.message, text)
        self._stop_ranks("failed")

    def _write_stacks(self, stacks_by_rank: dict[int, str]) -> None:
        self.has_written_stacks = True
        heading = "[polyfleet: no progress; stacks of rank {}]"
        self.ranks.write_lines(
            {n: [heading.format(n), *stacks.rstrip().splitlines()] for n, stacks in stacks_by_rank.items()}
        )

    def _kill(self) -> None:
        self.commands.kill_all()
        supervisor_handle.kill_all(self.folder, [os.getpid()])

    def _stop_ranks(self, reason: str) -> None:
        """Start to stop the ranks for this reason, unless they are being stopped for a stronger one."""
        if STRENGTH[reason] <= STRENGTH[self.reason]:
            return
        self.reason = reason
        graces_s = {"preempt": self.launch["grace_s"], "cancel": CANCEL_GRACE_S, "fence": CANCEL_GRACE_S}
        grace_s = graces_s.get(reason, 0.0)
        self.kill_at_s = min(self.kill_at_s, lease.now_s() + grace_s)
        self.checked_s = 0.0
        self.requested_at = min(self.requested_at, time.time())
        for pid, number in self.ranks.running.items() if grace_s else ():
            if process_tree.read_status(pid) is not None:  # it still runs
                self.interrupted_ranks.add(number)
            process_tree.send(pid, signal.SIGTERM, group=self.by_group)

    def _command_saves(self) -> bool:
        """Return whether a preempted command whose shell has ended may still save in its child processes."""
        may_save = self.reason == "preempt" and self.by_group and lease.now_s() < self.kill_at_s
        return may_save and bool(process_tree.attempt_processes([os.getpid()], self.folder.shared))

    def _finish(self) -> None:
        self._reap()
        result, unreadable = self.results.result()
        state = outcome.state(self.reason, self.ranks.codes, len(self.launch["ranks"]), self._preemption())
        failure = self._failure(state)
        if state == "succeeded" and unreadable:
            state, failure = "failed", self._node_failure("unreadable", unreadable)
        elif state == "succeeded" and (refusal := self.outputs.final_check()):
            state, failure = "failed", self._node_failure("storage", refusal)
        peak_bytes = (self.group.peak_bytes() if self.group else 0) or sum(self.ranks.peaks.values())
        self.results.delete_files(self.ranks.codes)
        if self.launch["checkpoint_root"]:
            self._remove_empty()
        self.results.write_outcome(
            Outcome(*self.attempt, state, self.ranks.codes, failure, result, time.time(), peak_bytes)
        )
        if self.group is not None and not self.group.remove(supervisor_handle.REMOVE_S):
            print(f"the control group {self.group.path} cannot be removed", file=sys.stderr)  # noqa: T201 - into supervisor.log

    def _remove_empty(self) -> None:
        """Remove the job's folders if they are empty.

        Before the outcome is written: then the next attempt may start.
        """
        self.outputs.remove_empty()
        with suppress(OSError):
            Path(self.launch["checkpoint_root"]).rmdir()

    def _preemption(self) -> outcome.Preemption:
        """Reaction of the ranks to a preemption. A result of a command means that all its ranks here are done."""
        if self.reason != "preempt":
            return outcome.Preemption()
        stopped_early, done_ranks = outcome.read_notes(self.folder.events, self.requested_at)
        if self.by_group and os.path.lexists(self.folder.result):
            done_ranks = frozenset(self.ranks.codes)
        return outcome.Preemption(frozenset(self.interrupted_ranks), stopped_early, done_ranks, self.by_group)

    def _failure(self, state: str) -> Failure | None:
        if state == "lost":
            return self._node_failure("lost", "its lease expired: neither the server nor a fence could be reached")
        if state == "preempted" and self.by_group and set(self.ranks.codes.values()) - outcome.TERMINATED - {0}:
            return self._first_failure()  # reported, but the attempt does not count as failed
        return (self.failure or self._first_failure()) if state == "failed" else None

    def _node_failure(self, kind: str, message: str) -> Failure:
        """A failure of all ranks on this node, under the number of the first one."""
        return Failure(self.launch["ranks"][0]["rank"], self.launch["node"], kind, message)

    def _first_failure(self) -> Failure:
        """The failure of the rank that failed first."""
        number, pid, disk = self.first_failed or FirstFailure(outcome.first_failed_rank(self.ranks.codes), 0, "")
        record = self.results.failure(number)
        log, code, peak_bytes = self.ranks.logs[number], self.ranks.codes[number], self.ranks.peaks.get(number, 0)
        node = self.launch["node"]
        errors = log.errors
        failed_rank = outcome.FailedRank(
            number, node, pid, code, record, errors.reason, errors.mentions_full_disk, disk, peak_bytes
        )
        return outcome.cause(failed_rank, self.memory)


def _write_record(folder: AttemptFolder) -> None:
    """Write supervisor.json, by which the agent finds this process, and send our stderr to supervisor.log."""
    own_process, reaper_process = process_tree.identify(os.getpid()), process_tree.identify(os.getppid())
    if own_process is None or reaper_process is None:
        raise RuntimeError("the reaper has exited")
    supervisor_handle.write_pids(folder, own_process, reaper_process)
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(folder.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (null, 1), (errors, 2)):
        os.dup2(source, target)


def main() -> int:
    return supervise(Path(sys.argv[1]), int(sys.argv[2]), reaper.detach())


def supervise(path: Path, lock: int, launcher: int) -> int:
    """Supervise the attempt in a child; this process becomes the reaper.

    Returns the exit code, in the child. One byte is written to `launcher` once the supervisor is on record.
    """
    folder = AttemptFolder(path)
    attempt = parse(path.name)
    if attempt is None:
        return 2
    reaper.fork_supervisor(folder, lock, launcher)
    secrets = sys.stdin.read()
    if not secrets:  # the agent failed to prepare the folder and closed the pipe
        return 0
    supervisor = Supervisor(folder, attempt, json.loads(secrets))
    supervisor.ranks.install_signal_handlers(supervisor.on_signal)
    _write_record(folder)
    os.write(launcher, b"1")
    os.close(launcher)
    supervisor.run()
    return 0
