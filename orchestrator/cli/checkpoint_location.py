"""Tools for checkpoints as commands run them: on this machine or in the fleet, with progress on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cluster.errors import FleetError
from orchestrator.checkpoint_address import expanded, may_be_a_job, of_job
from orchestrator.cli.output import print_message, progress_line
from orchestrator.show.units import size

Progress = Callable[[int, int], None]


def run_tool_locally(verb: str, arguments: dict[str, Any], what: str = "") -> Any:
    """Run a tool here, in a child: this process imports no torch."""
    from workers.checkpoint.tools import run_in_child

    paths = {k: expanded(v) for k, v in arguments.items() if v is not None}
    with byte_progress(what or verb) as progress:
        return run_in_child(verb, paths, progress, sys.executable, follow_links=True)


def run_tool_in_fleet(verb: str, arguments: dict[str, Any], what: str = "", key: str = "") -> Any:
    from orchestrator.client import connect

    told = {k: v for k, v in arguments.items() if v is not None}
    with connect(progress=print_message) as client, byte_progress(what or verb) as progress:
        return client.checkpoint_tool(verb, told, progress, key)


def in_its_pool(place: str) -> str:
    """As checkpoint_places.of_job; without a server it is a path of this machine."""
    if not may_be_a_job(place):
        return place
    from orchestrator.client import connect

    try:
        client = connect(start=False)
    except FleetError:
        return place
    with client:
        return of_job(client, place)


@contextmanager
def byte_progress(what: str) -> Iterator[Progress]:
    """Tells bytes done, bytes in all and the rate, on stderr: a bar on a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        with progress_line(what) as update:
            yield lambda done, total: update(f"{what}: {size(done)} of {size(total)}" if total else what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(),
        DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
