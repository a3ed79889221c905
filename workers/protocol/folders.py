"""The two folders of an attempt on a node. Standard library only, and quick to import.

attempts/KEY is its record, which only agent and supervisor write:
order.json        the Order; no secrets
launch.json       what the supervisor starts: command, environment and folder of each rank; no secrets
supervisor.json   the processes of the supervisor and its reaper: see attempt/supervision/supervisor_handle.py
supervisor.log    stderr of the supervisor itself: empty, unless something is wrong with it
lock              locked by the supervisor while it runs
lease             deadline in seconds of the boot clock; written in place
stop              "preempt", "cancel" or "fence"
started           exists once every rank has been started
door              socket for commands beside the ranks, while these run: see attempt/supervision/exec_commands.py
rank-R.log        `TIME out|err TEXT` lines; rank-R.log.N continues from byte N
outcome.json      the Outcome, written last
unreadable        exists once files of the ranks could not be read: {"reason"}
removed           exists once the ranks' files were removed, after the controller stored the outcome
.NAME.reserve     disk space for NAME, in case the disk is full when NAME is written

shared/KEY is what its ranks may write, and the only one of the two whose path they get. User code may have replaced any
file there by anything:
order.json        a copy for the rank
events.jsonl      one JSON object per line, appended by the ranks
work/R/           the rank's working directory
failure-R.json    a Failure, written by a rank that caught the user's exception
progress-R        a rank's progress, written in place: see rank_progress.py
stacks-R          stacks of a rank's threads, appended at each request of its supervisor
result.json       the task's result, written by global rank 0
session.json      address of a benchmark session
"""

import json
import os
import re
import threading
from pathlib import Path
from typing import Any, NamedTuple

from cluster.input.untrusted_files import UnreadableFile, read_bytes

MAX_RECORD_BYTES = 16 << 20
MAX_RESULT_BYTES = 4 << 20
NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,127})\.(\d+)\.(\d+)", re.ASCII)


class AttemptId(NamedTuple):
    job: str
    epoch: int
    node_rank: int

    def __str__(self) -> str:
        return f"{self.job}.{self.epoch}.{self.node_rank}"


def parse(name: str) -> AttemptId | None:
    """Parse the name of an attempt's folder; None for any other name, so untrusted names are safe."""
    match = NAME.fullmatch(name)
    return AttemptId(match[1], int(match[2]), int(match[3])) if match else None


class SharedFolder:
    """Paths of the files that an attempt's ranks may write."""

    def __init__(self, shared: Path):
        self.shared = shared
        self.shared_order = shared / "order.json"
        self.events = shared / "events.jsonl"
        self.result = shared / "result.json"
        self.works = shared / "work"

    def failure(self, rank: int) -> Path:
        return self.shared / f"failure-{rank}.json"

    def beat(self, rank: int) -> Path:
        return self.shared / f"progress-{rank}"

    def stacks(self, rank: int) -> Path:
        return self.shared / f"stacks-{rank}"

    def work(self, rank: int) -> Path:
        return self.works / str(rank)


class AttemptFolder(SharedFolder):
    """Paths of one attempt: of its record, and of what its ranks may write, in a folder beside it."""

    def __init__(self, path: Path):
        super().__init__(path.parent.parent / "shared" / path.name)
        self.path = path
        self.order = path / "order.json"
        self.launch = path / "launch.json"
        self.supervisor = path / "supervisor.json"
        self.lock = path / "lock"
        self.lease = path / "lease"
        self.stop = path / "stop"
        self.started = path / "started"
        self.outcome = path / "outcome.json"
        self.supervisor_log = path / "supervisor.log"
        self.unreadable = path / "unreadable"
        self.removed_mark = path / "removed"

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write `text` to `path` by rename, so that a reader sees the old text or the new one.

    `durable` survives a power cut.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as f:
            f.write(text)
            if durable:
                f.flush()
                os.fsync(f.fileno())
        temporary.replace(path)
    except OSError:  # above all a full disk
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    replace_text(path, json.dumps(value), durable=durable)


def read_json(path: Path) -> Any:
    """Read a record of ours; None if it is absent or cannot be read."""
    try:
        return json.loads(read_bytes(path, MAX_RECORD_BYTES))
    except (UnreadableFile, FileNotFoundError, ValueError, RecursionError):
        return None
