"""An embedded fleet: a Ray head and one raylet per pool node on this machine, each from its pool's environment.

It outlives whoever started it and is stopped by the process ids in fleet.json. Ray listens on loopback only.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from cluster import environments, fleet_record, heads, locking
from cluster.connect import foreign_token
from cluster.errors import Conflict, FleetError, SpecError, UserError
from cluster.fleet_record import FleetRecord
from cluster.paths import home, open_private, umask
from cluster.raylets import (
    await_started,
    forget_tokens,
    keep_logs,
    make_storage,
    new_token,
    start_worker,
    stop_all,
    stop_unrecorded,
)
from cluster.spec import FleetSpec
from cluster.version import VERSION

Progress = Callable[[str], None]
REPAIR = b"repair"
REPAIR_S = 60.0
"""`up` and `down` wait so long for a repair by the server, which `down` ends first."""


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
    with one_at_a_time():
        current = _current(progress)
        if current is not None and current.headless and current.pools != _plain_pools(spec):
            _clean_up(current, progress)
            current = None
        if current is not None and current.pools != _plain_pools(spec):
            raise Conflict(f"fleet {current.name!r} is up at {current.address}", "run `polyfleet down` first")
        _make_storages(spec)
        interpreters = {name: environments.create(pool.environment, progress) for name, pool in spec.pools.items()}
        if current is not None:
            return with_head(replace(current, found=dict(found)), spec, interpreters, progress)
        try:
            new = _new_record(spec, left_out, found)
            progress("starting the head")
            return start_missing(heads.start(new), spec, interpreters, progress)
        except BaseException:
            if (begun := fleet_record.read()) is not None:
                keep_logs(begun)
                stop_all(begun)
            raise


def down(progress: Progress) -> list[str]:
    """Stop every process of the recorded fleet and remove its temporary files. Returns the nodes stopped."""
    with one_at_a_time():
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
    with one_at_a_time():
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
def one_at_a_time(what: bytes = b"") -> Iterator[None]:
    """Hold this home's fleet. Raises Conflict where somebody else does: at once, but for a repair after REPAIR_S."""
    deadline = time.monotonic() + (0 if what == REPAIR else REPAIR_S)
    with open_private(home() / "fleet.lock") as lock:
        while not locking.take(lock):
            if os.pread(lock.fileno(), len(REPAIR), 0) != REPAIR or time.monotonic() > deadline:
                raise Conflict("another `polyfleet up` or `down` is at work here", "wait for it to end")
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


def _plain_pools(spec: FleetSpec) -> dict[str, dict[str, object]]:
    return {name: pool.model_dump(mode="json") for name, pool in spec.pools.items()}


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
    forget_tokens()
    token = new_token()
    new = FleetRecord(
        name=spec.name,
        state="starting",
        address="",
        version=VERSION,
        started_s=time.time(),
        token_path=str(token),
        pools=_plain_pools(spec),
        left_out=tuple((pool, why) for pool, why in left_out),
        found=dict(found),
        umask=umask(),
    )
    try:
        return heads.successor(new)
    except OSError:
        token.unlink()
        raise


def declared(spec: FleetSpec) -> dict[str, tuple[str, int]]:
    """Pool and number of each node, by the node's name."""
    return {f"{name}-{number}": (name, number) for name, pool in spec.pools.items() for number in range(pool.nodes)}


def with_head(
    record: FleetRecord, spec: FleetSpec, interpreters: Mapping[str, Path], progress: Progress
) -> FleetRecord:
    """A fleet that was up, with a head again if it has none, and with every node that has ended. Raises FleetError for
    the first that does not start; then the others serve.
    """
    record = heads.restart(record, progress) if record.headless else record
    try:
        return start_missing(record, spec, interpreters, progress)
    except BaseException:
        if (begun := fleet_record.read()) is not None:
            begun = replace(begun, state="up")
            fleet_record.write(begun)
            heads.abandon(begun)
        raise


def start_missing(
    record: FleetRecord, spec: FleetSpec, interpreters: Mapping[str, Path], progress: Progress
) -> FleetRecord:
    """Start the declared nodes that do not live, all at once, and wait for them."""
    living = {p.node for p in record.living()}
    missing = {node: place for node, place in declared(spec).items() if node not in living}
    if missing:
        progress(f"starting {', '.join(missing)}")
    for place in missing.values():
        record = start_worker(record, spec, place, interpreters[place[0]])
    for process in record.processes:
        if process.node in missing:
            await_started(process)
    record = replace(record, state="up")
    fleet_record.write(record)
    return heads.abandon(record)
