"""Where a checkpoint is that a command names: POOL:PATH in the fleet, or a path or URI that this machine reaches."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster import places
from cluster.errors import UserError
from orchestrator.cli.output import say, waiting
from orchestrator.show.units import size

_POOL = re.compile(rf"{places.POOL.pattern}:[^/\\].*")
Progress = Callable[[int, int], None]


def is_local(place: str) -> bool:
    """A path (absolute, `./…`, `~…`, or without a colon) or a URI; POOL:PATH is the fleet's. Raises SpecError for a URI
    that is no object store's.
    """
    if places.is_uri(place):
        places.uri(place, "place")
        return True
    return not _POOL.fullmatch(place)


def all_local(*named: str) -> bool:
    """Raises UserError for a mixture of places that no single machine reaches."""
    kinds = {is_local(place) for place in named if not places.is_uri(place)}
    if len(kinds) > 1:
        raise UserError(
            f"{' and '.join(named)} are a path of this machine and a pool's storage",
            "name both in pools, or both on this machine; an object store is reached from either",
        )
    return not kinds or kinds.pop()


def on_this_machine(verb: str, arguments: dict[str, Any], what: str = "") -> Any:
    """Run a tool here, in a child: this process imports no torch."""
    from workers.checkpoint.tools import run_in_child

    paths = {k: _expanded(v) for k, v in arguments.items() if v is not None}
    with working(what or verb) as progress:
        return run_in_child(verb, paths, progress, sys.executable)


def _expanded(value: Any) -> Any:
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~") else value


def in_the_fleet(verb: str, arguments: dict[str, Any], what: str = "", key: str = "") -> Any:
    from orchestrator.client import connect

    told = {k: v for k, v in arguments.items() if v is not None}
    with connect(progress=say) as client, working(what or verb) as progress:
        return client.checkpoint_tool(verb, told, progress, key)


@contextmanager
def working(what: str) -> Iterator[Progress]:
    """Tells bytes done, bytes in all and the rate, on stderr: a bar on a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        with waiting(what) as update:
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
