"""An embedded fleet: a Ray head and one raylet per pool node on this machine, each from its pool's environment.

It outlives whoever started it and is stopped by the process ids in fleet.json. Ray listens on loopback only, unless
the fleet has hosts: then on the address that the fleet file names, encrypted.
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

from cluster import cluster_versions, environments, file_lock, fleet_record, ray_head, tls, tokens
from cluster.errors import Conflict, FleetError, SpecError, UserError
from cluster.fleet_record import FleetRecord, HostRecord
from cluster.fleet_spec import FleetSpec, parse_fleet
from cluster.hosts.spec import HeadSpec, SSHSpec
from cluster.paths import home, open_private, umask
from cluster.raylets import (
    make_storage,
    new_token,
    preserve_logs,
    remove_tokens,
    start_worker,
    stop_all,
    stop_unrecorded_processes,
    wait_until_started,
)
from cluster.version import VERSION

Progress = Callable[[str], None]
REPAIR = b"repair"
WAIT_S = 60.0
"""`up` and `down` wait so long for each other, and for a repair by the server, which `down` ends first."""


def up(
    spec: FleetSpec,
    progress: Progress,
    left_out: Sequence[tuple[str, str]] = (),
    found: Mapping[str, int] = MappingProxyType({}),
) -> FleetRecord:
    """Bring `spec` up and return its record. All nodes or none; when it is up already, only what it has lost is
    started, and no attempt ends.

    `left_out` is kept in the record: pools that cannot exist here, with the reason. `found` counts this machine's
    accelerators by backend.

    Raises Conflict when another fleet is up here, FleetError when a node does not start (its log's end is in the
    message).
    """
    with fleet_lock(progress=progress):
        current = _current(progress)
        if current is not None and current.headless and _differs(current, spec):
            _clean_up(current, progress)
            current = None
        refuse_other(current, spec)
        here = spec.here()
        _refuse_address(spec)
        _make_storages(here)
        interpreters = _Interpreters(here, progress)
        if current is None or current.headless:
            interpreters.make_all()
        if current is not None:
            policy = spec.policy.model_dump(mode="json")
            again = replace(current, found=dict(found), pools=plain_pools(spec), policy_spec=policy)
            return start_with_head(again, here, interpreters, progress)
        try:
            new = _new_record(spec, left_out, found)
            progress("starting the head")
            return start_missing_nodes(ray_head.start(new), here, interpreters, progress)
        except BaseException:
            if (begun := fleet_record.read()) is not None:
                preserve_logs(begun)
                stop_all(begun)
            raise


class _Interpreters(dict[str, Path]):
    """By pool. One is made, or looked at, when it is first asked for: where all nodes run, none is."""

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
    """Stop every process of the recorded fleet and remove its temporary files. Returns the nodes stopped."""
    with fleet_lock(progress=progress):
        try:
            record = fleet_record.read()
        except fleet_record.DamagedRecord as e:
            progress(e.message)
            return [f"{stop_unrecorded_processes()} processes of this home"]
        if record is None:
            return []
        stopped = [p.node for p in record.living()]
        progress(_stopping(stopped) if record.ours else f"leaving {record.address}: not ours to stop")
        stop_all(record)
        return stopped


def _stopping(nodes: list[str]) -> str:
    count = len(nodes) - nodes.count(ray_head.HEAD)
    head = " and Ray's head" if ray_head.HEAD in nodes else ""
    return f"stopping {count} node{'s' * (count != 1)}{head}"


def join_cluster(address: str, progress: Progress, spec: FleetSpec | None = None) -> FleetRecord:
    """Use a Ray cluster that somebody else runs, with its token: RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token. `spec` says
    what its pools cost and which of them grow; without, what was said before holds.

    Raises FleetError when there is none: without a token anybody who reaches Ray's port runs code as its user. Raises
    SpecError where it has another Ray or Python.
    """
    with fleet_lock(progress=progress):
        if (current := _current(progress)) is not None and current.address != address:
            raise Conflict(f"fleet {current.name!r} is up at {current.address}", "run `polyfleet down` first")
        _answers(address)
        loopback = address.rpartition(":")[0] in ("127.0.0.1", "localhost")
        token = tokens.foreign_token()
        cluster_versions.refuse_other(address, cluster_versions.read(address, token), cluster_versions.ours())
        record = FleetRecord("attached", "up", address, VERSION, time.time(), str(token), loopback=loopback)
        if current is not None:  # a node of ours there is not forgotten
            record = replace(record, processes=current.processes, joined_dir=current.joined_dir)
            record = replace(record, name=current.name, pools=current.pools, policy_spec=current.policy_spec)
        if spec is not None:
            policy = spec.policy.model_dump(mode="json")
            record = replace(record, name=spec.name, pools=plain_pools(spec), policy_spec=policy)
        fleet_record.write(record)
        progress(f"using the Ray cluster at {address}")
        return record


def _answers(address: str) -> None:
    """Raises SpecError for what is no address, FleetError where nothing listens."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise SpecError("address", f"{address!r} is no address", "write HOST:PORT, as `ray start --head` prints it")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as e:
        remedy = "write it as `ray start --head` prints it: Ray listens on the machine's own address, not on 127.0.0.1"
        raise FleetError(f"nothing answers at {address}: {e}", remedy) from None


def set_fleet_state(state: str) -> None:
    """Write down what is to become of the fleet: the server reads it in its next turn. Raises Conflict."""
    with fleet_lock():
        if (current := fleet_record.read()) is not None:
            fleet_record.write(replace(current, state=state))


def keep_hosts(joining: Mapping[str, HostRecord]) -> FleetRecord:
    """Write these hosts down, in place of what is known of them. Raises FleetError when the fleet was taken down."""
    with fleet_lock():
        if (current := fleet_record.read()) is None:
            raise FleetError("the fleet was taken down meanwhile", "`polyfleet up` again")
        others = [host for host in current.hosts if host.name not in joining]
        current = replace(current, hosts=(*others, *joining.values()))
        fleet_record.write(current)
        return current


def forget_hosts(names: Collection[str]) -> None:
    with fleet_lock():
        if (current := fleet_record.read()) is not None:
            fleet_record.write(replace(current, hosts=tuple(h for h in current.hosts if h.name not in names)))


def record() -> FleetRecord | None:
    """What is recorded for this home; ask its `living()` before you trust it."""
    return fleet_record.read()


@contextmanager
def fleet_lock(what: bytes = b"", progress: Progress | None = None) -> Iterator[None]:
    """Hold this home's fleet. Raises Conflict where somebody else does for WAIT_S; a repair does not wait."""
    began_s = time.monotonic()
    with open_private(home() / "fleet.lock") as lock:
        while not file_lock.acquire(lock):
            others = os.pread(lock.fileno(), len(REPAIR), 0) != REPAIR
            if what == REPAIR or time.monotonic() - began_s > WAIT_S:
                raise Conflict(
                    "another `polyfleet up` or `down` is running for this home",
                    "wait until it ends, then run the command again",
                )
            if progress and others:
                progress("waiting for another `polyfleet up` or `down` to end")
                progress = None
            time.sleep(0.05)
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), what, 0)
        yield


def _current(progress: Progress) -> FleetRecord | None:
    """The fleet that is up, maybe without its head; or None after the left-overs of one that did not end well are
    gone.
    """
    found = fleet_record.read()
    if found is None or found.state == "up" or found.before:
        return found
    _clean_up(found, progress)
    return None


def _clean_up(record: FleetRecord, progress: Progress) -> None:
    progress("cleaning up after a fleet that did not end well")
    stop_all(record)


def refuse_other(current: FleetRecord | None, spec: FleetSpec) -> None:
    """Raises Conflict when another fleet than `spec` is up here."""
    if current is not None and _differs(current, spec):
        raise Conflict(f"fleet {current.name!r} is up at {current.address}", "run `polyfleet down` first")


def _differs(record: FleetRecord, spec: FleetSpec) -> bool:
    """In more than its hosts, which may come and go while the fleet is up."""
    hosts = ("hosts", "min_hosts", "ssh")
    kept = [
        {name: {key: value for key, value in pool.items() if key not in hosts} for name, pool in pools.items()}
        for pools in (record.pools, plain_pools(spec))
    ]
    return kept[0] != kept[1] or record.projects != plain_projects(spec) or HeadSpec(**record.head_spec) != spec.head


def plain_projects(spec: FleetSpec) -> dict[str, dict[str, object]]:
    return {name: project.model_dump(mode="json") for name, project in spec.projects.items()}


def plain_pools(spec: FleetSpec) -> dict[str, dict[str, object]]:
    return {name: pool.model_dump(mode="json") for name, pool in spec.pools.items()}


def _refuse_address(spec: FleetSpec) -> None:
    """Raises SpecError where the head cannot listen there."""
    if not spec.head.address:
        return
    family = socket.AF_INET6 if ":" in spec.head.address else socket.AF_INET
    try:
        with socket.socket(family) as s:
            s.bind((spec.head.address, 0))
    except OSError:
        said = f"{spec.head.address} is not an address of this machine"
        raise SpecError("head.address", said, "`ip address` lists them; name one that the hosts reach") from None


def _make_storages(spec: FleetSpec) -> None:
    """Raises SpecError before anything starts."""
    for name, pool in spec.pools.items():
        try:
            make_storage(name, pool)
        except UserError as e:
            raise SpecError(f"pools.{name}.storage", e.message, e.remedy) from None
        except OSError as e:
            remedy = "name a folder this machine can make, or leave it out"
            raise SpecError(f"pools.{name}.storage", f"{e.filename}: {e.strerror}", remedy) from None


def _new_record(spec: FleetSpec, left_out: Sequence[tuple[str, str]], found: Mapping[str, int]) -> FleetRecord:
    """With a token of its own: whoever learnt that of an earlier fleet has nothing."""
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
        left_out=tuple((pool, why) for pool, why in left_out),
        found=dict(found),
        umask=umask(),
        loopback=not spec.head.address,
        node_address=spec.head.address or "127.0.0.1",
        tls_dir=_certificates(spec),
        head_spec=spec.head.model_dump(mode="json"),
        ssh_spec=spec.ssh.model_dump(mode="json"),
        policy_spec=spec.policy.model_dump(mode="json"),
        projects=plain_projects(spec),
    )
    try:
        return ray_head.new_cluster_record(new)
    except OSError:
        token.unlink()
        raise


def _certificates(spec: FleetSpec) -> str:
    """The folder of this machine's, made with an authority of the fleet's own; "" for a fleet on loopback."""
    if not spec.head.address:
        return ""
    tls.make_authority(home() / "tls-authority")
    tls.make_certificate(home() / "tls-authority", home() / "tls", (spec.head.address,))
    return str(home() / "tls")


def declared_nodes(spec: FleetSpec, host: str = "") -> dict[str, tuple[str, str]]:
    """Pool and number of each node of this machine, by the node's name; of a machine called `host`, pool and host."""
    if host:
        return {f"{name}-{host}": (name, host) for name in spec.pools}
    here = ((name, str(number)) for name, pool in spec.pools.items() if not pool.hosts for number in range(pool.nodes))
    return {f"{name}-{number}": (name, number) for name, number in here}


def spec_of(record: FleetRecord) -> FleetSpec:
    """What it was brought up from."""
    if record.host:
        return pools_here(record.name, record.pools)
    told = {"pools": record.pools, "head": record.head_spec, "ssh": record.ssh_spec, "projects": record.projects}
    return parse_fleet({"name": record.name, **told})


def pools_here(name: str, pools: Mapping[str, Any]) -> FleetSpec:
    """Of a host; one with nothing but the head has none."""
    if not pools:
        return FleetSpec.model_construct(name=name, pools={}, head=HeadSpec(), ssh=SSHSpec())
    return parse_fleet({"name": name, "pools": pools})


def start_with_head(
    record: FleetRecord, spec: FleetSpec, interpreters: Mapping[str, Path], progress: Progress
) -> FleetRecord:
    """A fleet that was up, with a head again if it has none, and with every node that has ended. Raises FleetError for
    the first that does not start; then the others serve.
    """
    record = ray_head.restart(record, progress) if record.headless else record
    try:
        return start_missing_nodes(record, spec, interpreters, progress)
    except BaseException:
        if (begun := fleet_record.read()) is not None:
            begun = replace(begun, state="up")
            fleet_record.write(begun)
            ray_head.kill_previous_nodes(begun)
        raise


def start_missing_nodes(
    record: FleetRecord, spec: FleetSpec, interpreters: Mapping[str, Path], progress: Progress
) -> FleetRecord:
    """Start the declared nodes that do not live, all at once, and wait for them."""
    living = {p.node for p in record.living()}
    missing = {node: place for node, place in declared_nodes(spec, record.host).items() if node not in living}
    if missing:
        progress(f"starting {', '.join(missing)}")
    for place in missing.values():
        record = start_worker(record, spec, place, interpreters[place[0]])
    for process in record.processes:
        if process.node in missing:
            wait_until_started(process)
    record = replace(record, state="up")
    fleet_record.write(record)
    return ray_head.kill_previous_nodes(record)
