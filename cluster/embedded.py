"""An embedded fleet: a Ray head and one raylet per pool node on this machine, each from its pool's environment.

It outlives whoever started it and is stopped by the process ids in fleet.json. Ray listens on loopback only.
"""

import fcntl
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from cluster import environments, fleet_record, tokens
from cluster.connect import foreign_token
from cluster.errors import Conflict, FleetError, SpecError
from cluster.fleet_record import FleetRecord
from cluster.paths import home, private_dir
from cluster.processes import alive, free_port
from cluster.raylets import (
    AUTHENTICATION,
    await_started,
    forget_tokens,
    keep_logs,
    start_head,
    start_worker,
    stop_all,
    stop_unrecorded,
    storage_of,
)
from cluster.spec import FleetSpec
from cluster.version import VERSION

Progress = Callable[[str], None]


def up(
    spec: FleetSpec,
    progress: Progress,
    left_out: Sequence[tuple[str, str]] = (),
    found: Mapping[str, int] = MappingProxyType({}),
) -> FleetRecord:
    """Bring `spec` up and return its record. All nodes or none; when it is up already, only its lost nodes are started.

    `left_out` is kept in the record: pools that cannot exist here, with the reason. `found` counts this machine's
    accelerators by backend.

    Raises Conflict when another fleet is up here, FleetError when a node does not start (its log's end is in the
    message).
    """
    with _one_at_a_time():
        current = _current(progress)
        if current is not None and current.pools != _plain_pools(spec):
            raise Conflict(f"fleet {current.name!r} is up at {current.address}", "run `polyfleet down` first")
        _make_storages(spec)
        interpreters = {name: environments.create(pool.environment, progress) for name, pool in spec.pools.items()}
        if current is not None:
            return _start_workers(current, spec, interpreters, found, progress)
        try:
            progress("starting the head")
            record = start_head(_new_record(spec, left_out))
            await_started(record.processes[0])
            return _start_workers(record, spec, interpreters, found, progress)
        except BaseException:
            if (begun := fleet_record.read()) is not None:
                keep_logs(begun)
                stop_all(begun)
            raise


def down(progress: Progress) -> list[str]:
    """Stop every process of the recorded fleet and remove its temporary files. Returns the nodes stopped."""
    with _one_at_a_time():
        try:
            record = fleet_record.read()
        except fleet_record.DamagedRecord as e:
            progress(e.message)
            return [f"{stop_unrecorded()} processes of this home"]
        if record is None:
            return []
        stopped = [p.node for p in record.living()]
        progress(f"stopping {len(stopped)} nodes" if record.embedded else f"leaving {record.address}: not ours to stop")
        stop_all(record)
        return stopped


def attach(address: str, progress: Progress) -> FleetRecord:
    """Use a Ray cluster that somebody else runs, with its token: RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token.

    Raises FleetError when there is none: without a token anybody who reaches Ray's port runs code as its user.
    """
    with _one_at_a_time():
        if (current := _current(progress)) is not None and current.address != address:
            raise Conflict(f"fleet {current.name!r} is up at {current.address}", "run `polyfleet down` first")
        _answers(address)
        loopback = address.rpartition(":")[0] in ("127.0.0.1", "localhost")
        record = FleetRecord("attached", "up", address, VERSION, time.time(), str(foreign_token()), loopback=loopback)
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


def mark(state: str) -> None:
    """Write down what is to become of the fleet: the server reads it in its next turn."""
    if (current := fleet_record.read()) is not None:
        fleet_record.write(replace(current, state=state))


def record() -> FleetRecord | None:
    """What is recorded for this home; ask its `living()` before you trust it."""
    return fleet_record.read()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    private_dir(home())
    with (home() / "fleet.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict("another `polyfleet up` or `down` is at work here", "wait for it to end") from None
        yield


def _current(progress: Progress) -> FleetRecord | None:
    """The fleet that is up, or None after the left-overs of one that did not end well are gone."""
    found = fleet_record.read()
    if found is None:
        return None
    if found.state == "up" and not found.headless:
        return found
    progress("cleaning up after a fleet that did not end well")
    stop_all(found)
    return None


def _plain_pools(spec: FleetSpec) -> dict[str, dict[str, object]]:
    return {name: pool.model_dump(mode="json") for name, pool in spec.pools.items()}


def _make_storages(spec: FleetSpec) -> None:
    """Raises SpecError before anything starts."""
    for name, pool in spec.pools.items():
        try:
            private_dir(storage_of(name, pool))
        except OSError as e:
            remedy = "name a folder this machine can make, or leave it out"
            raise SpecError(f"pools.{name}.storage", f"{e.filename}: {e.strerror}", remedy) from None


def _new_record(spec: FleetSpec, left_out: Sequence[tuple[str, str]]) -> FleetRecord:
    """With a token of its own: whoever learnt that of an earlier fleet has nothing."""
    forget_tokens()
    token = tokens.ensure(home() / f"{AUTHENTICATION}-{secrets.token_hex(4)}")
    # Unix socket paths end at 107 bytes and Ray appends some 70: the folder's name has to be short.
    temp_dir = tempfile.mkdtemp(prefix="pf-", dir="/tmp")
    record = FleetRecord(
        name=spec.name,
        state="starting",
        address=f"127.0.0.1:{free_port()}",
        version=VERSION,
        started_s=time.time(),
        token_path=str(token),
        temp_dir=temp_dir,
        pools=_plain_pools(spec),
        left_out=tuple((pool, why) for pool, why in left_out),
    )
    try:
        fleet_record.write(record)
    except OSError:
        Path(temp_dir).rmdir()
        token.unlink()
        raise
    return record


def _start_workers(
    record: FleetRecord,
    spec: FleetSpec,
    interpreters: Mapping[str, Path],
    found: Mapping[str, int],
    progress: Progress,
) -> FleetRecord:
    """Start the declared nodes that do not live, all at once, and wait for them."""
    living = {p.node for p in record.processes if alive(p.process)}
    declared = [(name, number) for name, pool in spec.pools.items() for number in range(pool.nodes)]
    missing = [(name, number) for name, number in declared if f"{name}-{number}" not in living]
    if missing:
        progress(f"starting {', '.join(f'{name}-{number}' for name, number in missing)}")
    for name, number in missing:
        record = start_worker(record, spec, (name, number), interpreters[name], found)
    started = [p for p in record.processes if p.node not in living]
    with ThreadPoolExecutor(max_workers=len(started) or 1) as threads:
        list(threads.map(await_started, started))
    record = replace(record, state="up")
    fleet_record.write(record)
    return record
