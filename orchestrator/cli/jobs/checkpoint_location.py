"""Run checkpoint tools for commands, on this machine or in the fleet, with progress on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cluster.errors import FleetError
from orchestrator.cli.terminal.output import print_message, progress_line
from orchestrator.spec.checkpoint_address import expand_user, may_be_job_name, resolve_job
from orchestrator.units import size

Progress = Callable[[int, int], None]


def run_tool_locally(verb: str, arguments: dict[str, Any], label: str = "") -> Any:
    """Run a tool on this machine in a child process, so that this process does not import torch."""
    from workers.checkpoint.tools import run_in_child

    paths = {k: expand_user(v) for k, v in arguments.items() if v is not None}
    with byte_progress(label or verb) as progress:
        return run_in_child(verb, paths, progress, sys.executable, follow_links=True)


def run_tool_in_fleet(verb: str, arguments: dict[str, Any], label: str = "", key: str = "") -> Any:
    from orchestrator.client.checkpoint_transfer import run_tool
    from orchestrator.client.client import connect

    options = {k: v for k, v in arguments.items() if v is not None}
    with connect(progress=print_message) as client, byte_progress(label or verb) as progress:
        return run_tool(client, verb, options, progress, key)


def resolve_job_name(location: str) -> str:
    """Like checkpoint_address.of_job, but without a server `location` is a path of this machine."""
    if not may_be_job_name(location):
        return location
    from orchestrator.client.client import connect

    try:
        client = connect(start=False)
    except FleetError:
        return location
    with client:
        return resolve_job(client, location)


@contextmanager
def byte_progress(label: str) -> Iterator[Progress]:
    """Show bytes done, bytes in total and the rate on stderr: as a bar on a terminal, else as occasional lines."""
    if not sys.stderr.isatty():
        with progress_line(label) as update:
            yield lambda done, total: update(f"{label}: {size(done)} of {size(total)}" if total else label)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(),
        DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
