"""Progress of transfers, in bytes, on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orchestrator.cli.terminal.output import progress_line
from orchestrator.units import size

Progress = Callable[[int, int], None]


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
