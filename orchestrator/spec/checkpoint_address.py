"""Interpret locations of checkpoints and data that users write: POOL:PATH in the fleet, or a path or URI that this
machine can open. The command line and the Python interface use the same rules.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import FleetError, UserError
from cluster.input import checkpoint_location
from workers.checkpoint.tool_table import TOOLS

if TYPE_CHECKING:
    from orchestrator.client.client import Client

_POOL = re.compile(rf"{checkpoint_location.POOL.pattern}:[^/\\].*")


def is_local(location: str) -> bool:
    """Return whether `location` is a path (absolute, `./…`, `~…`, or without a colon) or a URI, and not POOL:PATH.
    Raises SpecError for a URI that is not of an object store.
    """
    if checkpoint_location.is_uri(location):
        checkpoint_location.parse_uri(location, "place")
        return True
    return not _POOL.fullmatch(location)


def is_local_path(location: str) -> bool:
    """Return whether `location` is a path on this machine: neither POOL:PATH nor a URI."""
    return not checkpoint_location.is_uri(location) and is_local(location)


def are_all_local(*locations: str) -> bool:
    """Return whether this machine can open all `locations`. Raises UserError if some are paths of this machine and
    others are in a pool: no single machine can open both.
    """
    paths = [location for location in locations if not checkpoint_location.is_uri(location)]
    local = [location for location in paths if is_local(location)]
    if local and len(local) < len(paths):
        pooled = next(location for location in paths if location not in local)
        raise UserError(
            f"{local[0]} is on this machine, and {pooled} is in a pool",
            "copy one to the other's location with `polyfleet checkpoint copy`, or choose another location",
        )
    return not paths or bool(local)


def is_between_machine_and_pool(one: str, other: str) -> bool:
    """Return whether one is a path of this machine and the other is in a pool; neither is in an object store."""
    return not any(map(checkpoint_location.is_uri, (one, other))) and is_local(one) != is_local(other)


def expand_user(value: Any) -> Any:
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~") else value


def checkpoint_arguments(verb: str) -> tuple[str, ...]:
    """Arguments of a tool that name an existing checkpoint, or an existing folder of checkpoints."""
    return tuple(name for name, use in TOOLS[verb].locations.items() if use.is_written == use.is_exact)


def may_be_job_name(location: str) -> bool:
    """Return whether `location` may be a job's name or id: a plain name that is not a file or folder here."""
    plain = not (checkpoint_location.is_uri(location) or set("/\\:") & set(location) or location.startswith((".", "~")))
    return plain and location != "" and not Path(location).exists()


def resolve_job(client: "Client", location: str) -> str:
    """Replace a job's name or id by POOL:ID of the pool with its checkpoints; return any other `location` unchanged.
    Raises UserError if several pools or none have checkpoints of the job, FleetError if some pools cannot be read now.
    """
    if not may_be_job_name(location):
        return location
    try:
        job = str(client.jobs.show(location)["id"])
    except UserError:
        return location
    pools = sorted({str(row["pool"]) for row in client.checkpoints.list(prefix=job)})
    if len(pools) == 1:
        return f"{pools[0]}:{job}"
    if pools:
        raise UserError(f"pools {', '.join(pools)} have checkpoints of job {job}", f"name one: {pools[0]}:{location}")
    if away := client.checkpoints.away():
        raise FleetError("; ".join(away), "`polyfleet up` brings back a node that is down")
    raise UserError(f"job {job} has no checkpoint", "`polyfleet checkpoint list` shows those of other jobs")
