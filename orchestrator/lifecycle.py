"""Bring a fleet and its server up on this machine, and take them down again."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import embedded, paths
from cluster.fleet_record import DamagedRecord
from cluster.spec import FleetSpec, default_fleet, demo_fleet, load_fleet, possible
from orchestrator.client import connect
from orchestrator.connection import refuse_other_version
from orchestrator.server import daemon

if TYPE_CHECKING:
    from orchestrator.client import Client

Progress = Callable[[str], None]
NODES_READY_S = 90.0
LEAVE_S = 20.0


def up(progress: Progress, file: Path | None = None, *, demo: bool = False, address: str = "") -> dict[str, Any]:
    """The fleet of `file`, the demo's, the Ray cluster at `address`, or else a pool for each back end of this machine.

    Returns the fleet as the server sees it, once every node has an agent, or after 90 s with those that have one.
    """
    if (server := daemon.find(paths.home())) is not None:
        refuse_other_version(server)
    before = embedded.record()
    try:
        return _up(progress, file, demo, address)
    except BaseException:
        if before is None and embedded.record() is not None:  # what this call began, it takes down again
            down(progress)
        raise


def _up(progress: Progress, file: Path | None, demo: bool, address: str) -> dict[str, Any]:
    if address:
        record = embedded.attach(address, progress)
    else:
        found = accelerators_here()
        fleet, left_out = _wanted(file, demo, list(found))
        for pool, reason in left_out:
            progress(f"pool {pool} is left out: {reason}")
        record = embedded.up(fleet, progress, left_out, found)
    with connect(progress=progress) as client:
        _await_nodes(client, {p.node for p in record.processes if p.role == "worker"}, progress)
        return client.fleet()


def down(progress: Progress) -> list[str]:
    """Stop the server, then the nodes of the embedded fleet. Returns what was stopped.

    Of a cluster that is not ours, the server first takes its agents away.
    """
    with suppress(DamagedRecord):
        _leave(progress)
    server = daemon.stop_server(paths.home())
    return [*(["server"] if server else []), *embedded.down(progress)]


def _leave(progress: Progress) -> None:
    record = embedded.record()
    if record is None or record.embedded or daemon.find(paths.home()) is None:
        return
    embedded.mark("leaving")
    deadline = time.monotonic() + LEAVE_S
    while (now := embedded.record()) and now.state == "leaving":
        if time.monotonic() > deadline:
            progress(f"{record.address} does not answer: agents of ours may be left there")
            return
        time.sleep(0.05)


def _wanted(file: Path | None, demo: bool, found: list[str]) -> tuple[FleetSpec, list[tuple[str, str]]]:
    """The fleet to bring up, and the pools left out of it with the reason."""
    if file is not None:
        return possible(load_fleet(file))
    return demo_fleet(found) if demo else (default_fleet(found), [])


def accelerators_here() -> dict[str, int]:
    """How many usable devices of each back end but the CPU this machine has; found without opening any."""
    from workers.discovery import discover

    devices, _ = discover()
    return dict(Counter(d.backend for d in devices if d.backend != "cpu" and not (d.emulated or d.unavailable_reason)))


def _await_nodes(client: "Client", expected: set[str], progress: Progress) -> None:
    """Until the server has an agent on every expected node; of a cluster that is not ours, on every node it has.

    Late ones are named; they may still come.
    """
    deadline = time.monotonic() + NODES_READY_S
    missing = expected or {"any node"}
    while missing:
        # Until it has joined this fleet's cluster, the server may still tell of the nodes of the one before.
        joined = client.fleet()["state"] == "up"
        states = {n["node"]: n["state"] for n in client.nodes()} if joined else {}
        wanted = expected or set(states) or {"any node"}
        now_missing = wanted - {node for node, state in states.items() if state == "ready"}
        if now_missing and now_missing != missing:
            progress(f"waiting for the agents of {', '.join(sorted(now_missing))}")
        missing = now_missing
        if missing and time.monotonic() > deadline:
            progress(f"not ready yet: {', '.join(sorted(missing))}; `polyfleet doctor` tells more")
            return
        time.sleep(0.1 if missing else 0)
