"""The file fleet.json: record of the fleet that is up on this machine.

It is written before the first process starts, so that no process is unrecorded after a crash.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.host.processes import ProcessId, is_alive
from cluster.paths import check_owner, home, private_dir, write_private
from cluster.serialization import from_plain, to_plain


class DamagedRecord(UserError):
    """fleet.json cannot be read, or is not a valid record."""

    def __init__(self, file: str, why: str):
        super().__init__(
            f"{file} is damaged: {why}",
            "run `polyfleet down`, which stops all processes of the fleet that it can find, then `polyfleet up`",
        )
        self.args = (file, why)


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """One `ray start` process.

    `role` is head, worker, or server (cluster/nodes/server_node.py), `created` as in ProcessId.
    """

    role: str
    node: str
    pool: str
    pid: int
    created: str | float

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.created)


@dataclass(frozen=True, slots=True)
class HostRecord:
    """A machine that this fleet reaches over SSH.

    `host` and `ssh` are as in the fleet file; the rest was discovered. `home` is our folder on it, `interpreters` are
    those of its pools' environments, some of which may have no Ray; `node_python` has Ray.
    """

    name: str
    host: str
    address: str
    ssh: dict[str, Any]
    nodes: tuple[str, ...]
    home: str
    code: str
    interpreters: dict[str, str]
    node_python: str = ""

    @property
    def python(self) -> str:
        """A Python that can run our own code."""
        return self.node_python or next(iter(self.interpreters.values()))


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """Record of a fleet on this machine.

    `state` is starting, up, stopping, leaving or left; `pools` and `projects` are those of the fleet file as plain
    data.

    `temp_dir` belongs to this fleet alone; Ray's own folder is in it. `previous_temp_dir` is the folder of the previous
    Ray cluster, while nodes of it may run. `joined_dir` is the folder of our own node in a cluster that others run.
    `skipped_pools` pairs a pool that cannot exist here with the reason. `accelerator_counts` counts this machine's
    accelerators by backend. `umask` is that of the user who ran `up`: jobs write files as they would in that user's
    shell.

    `node_address` is the address of this machine's nodes. `host` names this machine in a fleet whose head is elsewhere;
    `pools` are then those of this machine. `tls_dir` has the certificates of this machine, if the fleet spans several.
    `head_spec`, `ssh_spec`, `policy_spec` are as in the fleet file, `hosts` the machines that joined or may have
    joined. On a host, `head_spec` is set if it has the head. `cluster` distinguishes a head on a host from the previous
    one at its address.
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
    skipped_pools: tuple[tuple[str, str], ...] = ()
    accelerator_counts: dict[str, int] = field(default_factory=dict)
    umask: int = 0o022
    previous_temp_dir: str = ""
    node_address: str = "127.0.0.1"
    host: str = ""
    tls_dir: str = ""
    head_spec: dict[str, Any] = field(default_factory=dict)
    ssh_spec: dict[str, Any] = field(default_factory=dict)
    policy_spec: dict[str, Any] = field(default_factory=dict)
    hosts: tuple[HostRecord, ...] = ()
    joined_dir: str = ""
    cluster: str = ""
    projects: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def ray_dir(self) -> Path:
        """Ray's folder, inside our private one, because Ray makes its folders accessible to every user."""
        return Path(self.temp_dir) / "r"

    def cwd(self, node: str) -> Path:
        """Return the working folder of the node's processes, which identifies those that changed their title."""
        return Path(self.temp_dir) / "n" / node

    @property
    def is_embedded(self) -> bool:
        return bool(self.temp_dir)

    @property
    def head_host(self) -> str:
        """Name of the host that runs this fleet's head; "" if it runs here, or others run it."""
        return name_of(self.head_spec.get("host", "")) if not self.is_embedded else ""

    @property
    def is_ours(self) -> bool:
        """Whether we started its head, here or on a host."""
        return self.is_embedded or bool(self.head_spec.get("host"))

    @property
    def head(self) -> NodeProcess | None:
        """The head of an embedded fleet, running or ended."""
        return next((p for p in self.processes if p.role == "head"), None)

    @property
    def is_headless(self) -> bool:
        """Whether the head of this machine has ended. Its nodes and agents keep running and wait for it."""
        has_one = self.is_embedded and bool(self.head_spec or not self.host)
        return has_one and not (self.head is not None and is_alive(self.head.process))

    def running(self) -> tuple[NodeProcess, ...]:
        return tuple(p for p in self.processes if is_alive(p.process))


def name_of(host: str) -> str:
    """Turn an SSH destination into a name of a-z, 0-9 and '-', as it appears in names of nodes."""
    return re.sub(r"[^a-z0-9]+", "-", host.lower()).strip("-")


def path() -> Path:
    return home() / "fleet.json"


def read() -> FleetRecord | None:
    """Read the record of this home, or return None if no fleet is up.

    Raises UserError for another user's home.
    """
    check_owner(home())
    try:
        return from_plain(FleetRecord, json.loads(path().read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, UserError, RecursionError) as e:
        raise DamagedRecord(str(path()), str(e).splitlines()[0]) from None


def write(record: FleetRecord) -> None:
    private_dir(home())
    write_private(path(), json.dumps(to_plain(record), indent=1))


def remove() -> None:
    path().unlink(missing_ok=True)
