"""fleet.json: what is up on this machine, written before the first process starts, so that a crash leaves nothing
unknown.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.paths import home, private_dir, refuse_foreign_folder, write_private
from cluster.plain import from_plain, to_plain
from cluster.processes import ProcessId, alive


class DamagedRecord(UserError):
    def __init__(self, file: str, why: str):
        super().__init__(
            f"{file} is damaged: {why}", "`polyfleet down` stops what it can find of the fleet, then `polyfleet up`"
        )
        self.args = (file, why)


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """One `ray start` of ours. `role` is head or worker, `created` as in ProcessId."""

    role: str
    node: str
    pool: str
    pid: int
    created: str | float

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.created)


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """`state` is starting, up, stopping, leaving or left; `pools` holds each PoolSpec as plain data.

    `temp_dir` is ours alone; Ray's own folder lies in it. `before` is that of the Ray cluster before, while nodes of it
    may live. `left_out` pairs a pool that cannot exist here with the
    reason. `found` counts this machine's accelerators by backend. `umask` is that of who brought the fleet up: jobs
    write files as they would in their shell.
    """

    name: str
    state: str
    address: str
    version: str
    started_s: float
    token_path: str
    temp_dir: str = ""
    loopback: bool = True
    processes: tuple[NodeProcess, ...] = ()
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = ()
    found: dict[str, int] = field(default_factory=dict)
    umask: int = 0o022
    before: str = ""

    @property
    def ray_dir(self) -> Path:
        """Ray opens every folder it makes to everybody: its own lies in one that is closed."""
        return Path(self.temp_dir) / "r"

    def cwd(self, node: str) -> Path:
        """Where the node's processes work; those that have changed their title are known by it."""
        return Path(self.temp_dir) / "n" / node

    @property
    def embedded(self) -> bool:
        return bool(self.temp_dir)

    @property
    def head(self) -> NodeProcess | None:
        """That of an embedded fleet, dead or alive."""
        return next((p for p in self.processes if p.role == "head"), None)

    @property
    def headless(self) -> bool:
        """The head of an embedded fleet does not live. Its nodes and agents do, and wait for it."""
        return self.embedded and not (self.head is not None and alive(self.head.process))

    def living(self) -> tuple[NodeProcess, ...]:
        return tuple(p for p in self.processes if alive(p.process))


def path() -> Path:
    return home() / "fleet.json"


def read() -> FleetRecord | None:
    """The record of this home, or None when no fleet was brought up. Raises UserError for another user's home."""
    refuse_foreign_folder(home())
    try:
        return from_plain(FleetRecord, json.loads(path().read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, UserError, RecursionError) as e:
        raise DamagedRecord(str(path()), str(e).splitlines()[0]) from None


def write(record: FleetRecord) -> None:
    private_dir(home())
    write_private(path(), json.dumps(to_plain(record), indent=1))


def forget() -> None:
    path().unlink(missing_ok=True)
