"""The command `top`: show devices, their load and the jobs on them, refreshed periodically."""

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.terminal.output import Format, Output, emit, print_message, screen

if TYPE_CHECKING:
    from orchestrator.client.client import Client
    from orchestrator.client.top import StepRates, TopSnapshot
    from orchestrator.views.fleet import NodeView

Data = dict[str, Any]
EXIT_KEYS = ("q", "Q", "\x1b", "\x03")
INTERRUPT_CHECK_S = 0.25
"""How often a wait for a key checks for Ctrl-C: a SIGINT that arrives just before the wait, or in another thread, does
not interrupt it."""


def top(
    count: Annotated[
        int, typer.Option("--count", "-n", help="Number of refreshes before it ends (0: no limit)", min=0)
    ] = 0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one snapshot and exit (default without a terminal)")
    ] = False,
    every: Annotated[float, typer.Option("--every", help="Seconds between refreshes", min=0.5, max=3600.0)] = 2.0,
    output: Output = Format.TABLE,
) -> None:
    """Show devices, their utilisation, and the jobs on them with step and rate, live. `q` or Ctrl-C exits.

    Utilisation of accelerators comes from the drivers of NVIDIA and AMD; nodes report it every 10 s. For a CPU it is
    the load of its node. With `-o json` or `yaml` it prints one snapshot.
    """
    from orchestrator.client.client import connect
    from orchestrator.client.top import StepRates
    from orchestrator.show.top import top as shown

    rates = StepRates()
    with connect(progress=print_message) as client:
        if once or output is not Format.TABLE or not sys.stdout.isatty():
            emit(_take_snapshot(client, rates), output, shown)
            return
        _live(client, rates, count, every)


def _take_snapshot(client: "Client", rates: "StepRates") -> "TopSnapshot":
    from orchestrator.client import top

    rows = client.jobs.list(state=top.ON_DEVICES, limit=top.MAX_JOBS, fields=",".join(top.FIELDS))
    rows += client.jobs.list(state=top.WAITING, limit=top.MAX_JOBS, fields=",".join(top.FIELDS))
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return top.snapshot(_nodes(client), rows, rates, at)


def _nodes(client: "Client") -> "list[NodeView]":
    """Nodes of the fleet; empty while no fleet is up, so that the display continues until it is back."""
    from cluster.errors import FleetError
    from orchestrator.client.transport import ServerUnreachable

    try:
        return client.nodes.list()
    except ServerUnreachable:
        raise
    except FleetError:
        return []


def _live(client: "Client", rates: "StepRates", count: int, every_s: float) -> None:
    from orchestrator.show.top import top as shown

    done = 0
    try:
        with _keys() as keys, screen() as paint:
            while True:
                paint(shown(_snapshot_with_retry(client, rates)))
                done += 1
                if done == count or keys(every_s):
                    return
    except KeyboardInterrupt:
        return


def _snapshot_with_retry(client: "Client", rates: "StepRates") -> "TopSnapshot":
    """Take a snapshot; after a restart of the server, wait for the new one."""
    from orchestrator.client.transport import ServerUnreachable

    while True:
        try:
            return _take_snapshot(client, rates)
        except ServerUnreachable as e:
            client.reconnect(e)


@contextmanager
def _keys() -> "Iterator[_Keys]":
    """Read single keys without Enter, if stdin is a terminal."""
    if not sys.stdin.isatty():
        yield _Keys(None)
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin, termios.TCSADRAIN)
        yield _Keys(sys.stdin.fileno())
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class _Keys:
    def __init__(self, descriptor: int | None):
        self._descriptor = descriptor

    def __call__(self, within_s: float) -> bool:
        """Wait up to `within_s` for a key. Return whether it is one that exits; any other key refreshes at once."""
        watched = [] if self._descriptor is None else [self._descriptor]
        until = time.monotonic() + within_s
        while (remaining_s := until - time.monotonic()) > 0:
            ready, _, _ = select.select(watched, [], [], min(remaining_s, INTERRUPT_CHECK_S))
            if ready:
                return os.read(ready[0], 64).decode(errors="replace")[:1] in ("", *EXIT_KEYS)
        return False
