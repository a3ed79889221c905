"""Embedded fleet: a Ray head and one raylet per pool node on this machine.

Each raylet runs from its pool's environment. The fleet outlives the process that started it, and is stopped by the
process ids in fleet.json. Ray listens on loopback only, unless the fleet has hosts: then on the address that the fleet
file names, encrypted.
"""

import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cluster.environments import environments
from cluster.errors import Conflict, FleetError, SpecError, UserError
from cluster.fleet import fleet_record, tls
from cluster.fleet.fleet_record import FleetRecord, HostRecord
from cluster.fleet.fleet_spec import FleetSpec, parse_fleet
from cluster.fleet.host_spec import HeadSpec, SSHSpec
from cluster.host import file_lock, tokens
from cluster.nodes import cluster_versions, ray_head
from cluster.nodes.raylets import (
    make_storage,
    new_token,
    preserve_logs,
    remove_tokens,
    start_worker,
    stop_all,
    stop_unrecorded_processes,
    wait_until_started,
)
from cluster.paths import home, open_private, umask
from cluster.version import VERSION

Progress = Callable[[str], None]
REPAIR_MARK = b"repair"
WAIT_S = 60.0
"""Time that `up` and `down` wait for each other, and for a repair by the server, which `down` stops first."""


def up(
    spec: FleetSpec,
    progress: Progress,
    skipped_pools: Sequence[tuple[str, str]] = (),
    accelerators: Mapping[str, int] = MappingProxyType({}),
) -> FleetRecord:
    """Start the fleet `spec`, all nodes or none, and return its record.

    If it is up already, only its lost nodes are started, and no attempt ends. `skipped_pools` has the pools that cannot
    exist here, with the reason, for the record. `accelerators` counts this machine's by backend.

    Raises Conflict if another fleet is up here, FleetError if a node does not start, with the end of its log.
    """
    with fleet_lock(progress=progress):
        current = _current(progress)
        if current is not None and current.is_headless and _differs(current, spec):
            _clean_up(current, progress)
            current = None
        check_same_fleet(current, spec)
        local_spec = spec.local_part()
        _check_head_address(spec)
        _make_storages(local_spec)
        interpreters = _Interpreters(local_spec, progress)
        if current is None or current.is_headless:
            interpreters.make_all()
        if current is not None:
            updated = with_spec(replace(current, accelerator_counts=dict(accelerators)), spec)
            return start_with_head(updated, local_spec, interpreters, progress)
        try:
            new_record = _new_record(spec, skipped_pools, accelerators)
            progress("starting the head")
            return start_missing_nodes(ray_head.start(new_record), local_spec, interpreters, progress)
        except BaseException:
            if (started := fleet_record.read()) is not None:
                preserve_logs(started)
                stop_all(started)
            raise


class _Interpreters(dict[str, Path]):
    """Interpreters by pool, created or checked on first access; while all nodes run, none is accessed."""

    def __init__(self, spec: FleetSpec, progress: Progress):
        super().__init__()
        self._spec, self._progress = spec, progress

    def __missing__(self, pool: str) -> Path:
        self[pool] = environments.create(self._spec.pools[pool].environment, self._progress)
        return self[pool]

    def make_all(self) -> None:
        for pool in self._spec.pools:
            self[pool]


def down(progress: Progress) -> list[str]:
    """Stop every process of the recorded fleet and remove its temporary files. Returns the stopped nodes."""
    with fleet_lock(progress=progress):
        try:
            record = fleet_record.read()
        except fleet_record.DamagedRecord as e:
            progress(e.message)
            return [f"{stop_unrecorded_processes()} processes of this home"]
        if record is None:
            return []
        stopped = [p.node for p in record.running()]
        progress(_stop_message(stopped) if record.is_ours else f"leaving {record.address}, which keeps running")
        stop_all(record)
        return stopped


def _stop_message(nodes: list[str]) -> str:
    count = len(nodes) - nodes.count(ray_head.HEAD)
    head = " and Ray's head" if ray_head.HEAD in nodes else ""
    return f"stopping {count} node{'s' * (count != 1)}{head}"


def join_cluster(address: str, progress: Progress, spec: FleetSpec | None = None) -> FleetRecord:
    """Use a Ray cluster that others run, with its token: RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token.

    `spec` has the prices of its pools, and which of them grow; without it, the recorded ones stay.

    Raises FleetError if there is no token: without one, everybody who can reach Ray's port can run code as its user.
    Raises SpecError if the cluster has another Ray or Python.
    """
    with fleet_lock(progress=progress):
        if (current := _current(progress)) is not None and current.address != address:
            raise Conflict(f"fleet {current.name!r} is up at {current.address}", "run `polyfleet down` first")
        _check_reachable(address)
        loopback = address.rpartition(":")[0] in ("127.0.0.1", "localhost")
        token = tokens.external_token()
        cluster_versions.check_versions(address, cluster_versions.read(address, token), cluster_versions.own_versions())
        record = FleetRecord("attached", "up", address, VERSION, time.time(), str(token), loopback=loopback)
        if current is not None:  # keep our own node of that cluster
            record = replace(record, processes=current.processes, joined_dir=current.joined_dir)
            record = replace(record, name=current.name, pools=current.pools, policy_spec=current.policy_spec)
        if spec is not None:
            record = with_spec(replace(record, name=spec.name), spec)
        fleet_record.write(record)
        progress(f"using the Ray cluster at {address}")
        return record


def _check_reachable(address: str) -> None:
    """Check that something listens at an address.

    Raises SpecError for an invalid address, FleetError if not.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise SpecError("address", f"{address!r} is not an address", "write HOST:PORT, as `ray start --head` prints it")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as e:
        remedy = "write it as `ray start --head` prints it: Ray listens on the machine's own address, not on 127.0.0.1"
        raise FleetError(f"cannot connect to {address}: {e}", remedy) from None


def set_fleet_state(state: str) -> None:
    """Record the state that the fleet is to have: the server reads it in its next cycle. Raises Conflict."""
    with fleet_lock():
        if (current := fleet_record.read()) is not None:
            fleet_record.write(replace(current, state=state))


def record_hosts(joining: Mapping[str, HostRecord]) -> FleetRecord:
    """Record these hosts, which replaces their earlier records.

    Raises FleetError if `polyfleet down` has stopped the fleet.
    """
    with fleet_lock():
        if (current := fleet_record.read()) is None:
            raise FleetError("`polyfleet down` stopped the fleet before its hosts joined", "run `polyfleet up` again")
        other_hosts = [host for host in current.hosts if host.name not in joining]
        current = replace(current, hosts=(*other_hosts, *joining.values()))
        fleet_record.write(current)
        return current


def remove_hosts(names: Collection[str]) -> None:
    with fleet_lock():
        if (current := fleet_record.read()) is not None:
            fleet_record.write(replace(current, hosts=tuple(h for h in current.hosts if h.name not in names)))


def record() -> FleetRecord | None:
    """Return the record of this home. Its processes may have ended: see its `running()`."""
    return fleet_record.read()


@contextmanager
def fleet_lock(purpose: bytes = b"", progress: Progress | None = None) -> Iterator[None]:
    """Lock this home's fleet.

    Raises Conflict if another process holds the lock for WAIT_S; a repair does not wait.
    """
    started_s = time.monotonic()
    with open_private(home() / "fleet.lock") as lock:
        while not file_lock.acquire(lock):
            is_other_command = os.pread(lock.fileno(), len(REPAIR_MARK), 0) != REPAIR_MARK
            if progress and is_other_command:
                progress("waiting for another `polyfleet up` or `down` to end")
                progress = None
            if purpose == REPAIR_MARK or time.monotonic() - started_s > WAIT_S:
                raise Conflict(
                    "another `polyfleet up` or `down` is running for this home",
                    "wait until it ends, then run the command again",
                )
            time.sleep(0.05)
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), purpose, 0)
        yield


def _current(progress: Progress) -> FleetRecord | None:
    """Return the fleet that is up, possibly without its head, else None.

    What is left of a fleet that did not stop completely is cleaned up first.
    """
    fleet = fleet_record.read()
    if fleet is None or fleet.state == "up" or fleet.previous_temp_dir:
        return fleet
    _clean_up(fleet, progress)
    return None


def _clean_up(record: FleetRecord, progress: Progress) -> None:
    progress("cleaning up after a fleet that did not stop completely")
    stop_all(record)


def check_same_fleet(current: FleetRecord | None, spec: FleetSpec) -> None:
    """Raise Conflict if another fleet than `spec` is up here."""
    if current is not None and _differs(current, spec):
        raise Conflict(f"fleet {current.name!r} is up at {current.address}", "run `polyfleet down` first")


def _differs(record: FleetRecord, spec: FleetSpec) -> bool:
    """Return whether they differ in more than their hosts, which may join and leave while the fleet is up."""
    hosts = ("hosts", "min_hosts", "ssh")
    compared = [
        {name: {key: value for key, value in pool.items() if key not in hosts} for name, pool in pools.items()}
        for pools in (record.pools, plain_pools(spec))
    ]
    return (
        compared[0] != compared[1]
        or record.projects != plain_projects(spec)
        or HeadSpec(**record.head_spec) != spec.head
    )


def with_spec(record: FleetRecord, spec: FleetSpec) -> FleetRecord:
    """Return the record with what may change while the fleet is up: the hosts of its pools, and its policy."""
    return replace(record, pools=plain_pools(spec), policy_spec=spec.scheduler.settings())


def plain_projects(spec: FleetSpec) -> dict[str, dict[str, object]]:
    return {name: project.model_dump(mode="json") for name, project in spec.projects.items()}


def plain_pools(spec: FleetSpec) -> dict[str, dict[str, object]]:
    return {name: pool.model_dump(mode="json") for name, pool in spec.pools.items()}


def _check_head_address(spec: FleetSpec) -> None:
    """Raise SpecError if the head cannot listen at its address."""
    if not spec.head.address:
        return
    family = socket.AF_INET6 if ":" in spec.head.address else socket.AF_INET
    try:
        with socket.socket(family) as s:
            s.bind((spec.head.address, 0))
    except OSError:
        message = f"{spec.head.address} is not an address of this machine"
        raise SpecError("head.address", message, "name one that the hosts can reach; `ip address` lists them") from None


def _make_storages(spec: FleetSpec) -> None:
    """Create the pools' checkpoint folders before anything starts. Raises SpecError."""
    for name, pool in spec.pools.items():
        try:
            make_storage(name, pool)
        except UserError as e:
            raise SpecError(f"pools.{name}.storage", e.message, e.remedy) from None
        except OSError as e:
            remedy = "name a folder that this machine can create, or leave the field out"
            raise SpecError(f"pools.{name}.storage", f"{e.filename}: {e.strerror}", remedy) from None


def _new_record(
    spec: FleetSpec, skipped_pools: Sequence[tuple[str, str]], accelerators: Mapping[str, int]
) -> FleetRecord:
    """Write the record of a new fleet, with a new token: that of an earlier fleet may have leaked."""
    remove_tokens()
    token = new_token()
    new = FleetRecord(
        name=spec.name,
        state="starting",
        address="",
        version=VERSION,
        started_s=time.time(),
        token_path=str(token),
        pools=plain_pools(spec),
        skipped_pools=tuple((pool, reason) for pool, reason in skipped_pools),
        accelerator_counts=dict(accelerators),
        umask=umask(),
        loopback=not spec.head.address,
        node_address=spec.head.address or "127.0.0.1",
        tls_dir=_certificates(spec),
        head_spec=spec.head.model_dump(mode="json"),
        ssh_spec=spec.ssh.model_dump(mode="json"),
        policy_spec=spec.scheduler.settings(),
        projects=plain_projects(spec),
    )
    try:
        return ray_head.new_cluster_record(new)
    except OSError:
        token.unlink()
        raise


def _certificates(spec: FleetSpec) -> str:
    """Create the fleet's authority and this machine's certificates; returns their folder, "" for loopback."""
    if not spec.head.address:
        return ""
    tls.make_authority(home() / "tls-authority")
    tls.make_certificate(home() / "tls-authority", home() / "tls", (spec.head.address,))
    return str(home() / "tls")


def declared_nodes(spec: FleetSpec, host: str = "") -> dict[str, tuple[str, str]]:
    """Return (pool, number) of each node of this machine by node name; with `host`, (pool, host)."""
    if host:
        return {f"{name}-{host}": (name, host) for name in spec.pools}
    local_nodes = (
        (name, str(number)) for name, pool in spec.pools.items() if not pool.hosts for number in range(pool.nodes)
    )
    return {f"{name}-{number}": (name, number) for name, number in local_nodes}


def spec_of(record: FleetRecord) -> FleetSpec:
    """Return the spec from which the fleet was started."""
    return local_pools(record.name, record.pools) if record.host else parse_fleet(fleet_data(record))


def fleet_data(record: FleetRecord) -> dict[str, Any]:
    """Return the data of the fleet file from which the fleet was started, except its scheduler."""
    fields = {"pools": record.pools, "head": record.head_spec, "ssh": record.ssh_spec, "projects": record.projects}
    return {"name": record.name, **fields}


def local_pools(name: str, pools: Mapping[str, Any]) -> FleetSpec:
    """Return the spec of a host's part of a fleet. A host with only the head has no pools."""
    if not pools:
        return FleetSpec.model_construct(name=name, pools={}, head=HeadSpec(), ssh=SSHSpec())
    return parse_fleet({"name": name, "pools": pools})


def start_with_head(
    record: FleetRecord, spec: FleetSpec, interpreters: Mapping[str, Path], progress: Progress
) -> FleetRecord:
    """Restart the head of a fleet that is up, if it has ended, and every node that has ended.

    Raises FleetError for the first node that does not start; the others keep running.
    """
    record = ray_head.restart(record, progress) if record.is_headless else record
    try:
        return start_missing_nodes(record, spec, interpreters, progress)
    except BaseException:
        if (restarted := fleet_record.read()) is not None:
            restarted = replace(restarted, state="up")
            fleet_record.write(restarted)
            ray_head.kill_previous_nodes(restarted)
        raise


def start_missing_nodes(
    record: FleetRecord, spec: FleetSpec, interpreters: Mapping[str, Path], progress: Progress
) -> FleetRecord:
    """Start the declared nodes that are not running, all at once, and wait for them."""
    running = {p.node for p in record.running()}
    missing = {
        node: pool_and_number
        for node, pool_and_number in declared_nodes(spec, record.host).items()
        if node not in running
    }
    if missing:
        progress(f"starting {', '.join(missing)}")
    for pool_and_number in missing.values():
        record = start_worker(record, spec, pool_and_number, interpreters[pool_and_number[0]])
    for process in record.processes:
        if process.node in missing:
            wait_until_started(process)
    record = replace(record, state="up")
    fleet_record.write(record)
    return ray_head.kill_previous_nodes(record)
