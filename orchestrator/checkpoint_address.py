"""Where a checkpoint or data is that a user of this machine names: POOL:PATH in the fleet, or a path or URI that this
machine reaches. The command line and Python read them alike.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import checkpoint_location
from cluster.errors import FleetError, UserError

if TYPE_CHECKING:
    from orchestrator.client import Client

_POOL = re.compile(rf"{checkpoint_location.POOL.pattern}:[^/\\].*")


def is_local(place: str) -> bool:
    """A path (absolute, `./…`, `~…`, or without a colon) or a URI; POOL:PATH is the fleet's. Raises SpecError for a URI
    that is no object store's.
    """
    if checkpoint_location.is_uri(place):
        checkpoint_location.parse_uri(place, "place")
        return True
    return not _POOL.fullmatch(place)


def of_this_machine(place: str) -> bool:
    """A path here, and no URI."""
    return not checkpoint_location.is_uri(place) and is_local(place)


def all_local(*named: str) -> bool:
    """Raises UserError for a mixture of places that no single machine reaches."""
    paths = [place for place in named if not checkpoint_location.is_uri(place)]
    here = [place for place in paths if is_local(place)]
    if here and len(here) < len(paths):
        there = next(place for place in paths if place not in here)
        raise UserError(
            f"{here[0]} is on this machine, and {there} is in a pool",
            "bring one to the other with `polyfleet checkpoint copy`, or name another place for it",
        )
    return not paths or bool(here)


def between_here_and_a_pool(one: str, other: str) -> bool:
    """One is a path of this machine, the other lies in a pool; none in an object store."""
    return not any(map(checkpoint_location.is_uri, (one, other))) and is_local(one) != is_local(other)


def expanded(value: Any) -> Any:
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~") else value


def names_checkpoints(verb: str) -> tuple[str, ...]:
    """Arguments of a tool that name a checkpoint, or a folder of them, that is there."""
    return tuple(name for name, use in checkpoint_location.TOOLS[verb].items() if use.written == use.whole)


def may_be_a_job(place: str) -> bool:
    """A plain word that is no file or folder here: it may be a job's name or id."""
    plain = not (checkpoint_location.is_uri(place) or set("/\\:") & set(place) or place.startswith((".", "~")))
    return plain and place != "" and not Path(place).exists()


def of_job(client: "Client", place: str) -> str:
    """POOL:ID of the job that a plain word names, where one pool has its checkpoints; else `place` as it is. Raises
    UserError where several pools have some, or none has; FleetError where that cannot be read now.
    """
    if not may_be_a_job(place):
        return place
    try:
        job = str(client.job(place)["id"])
    except UserError:
        return place
    pools = sorted({str(row["pool"]) for row in client.checkpoints("", job)})
    if len(pools) == 1:
        return f"{pools[0]}:{job}"
    if pools:
        raise UserError(f"pools {', '.join(pools)} have checkpoints of job {job}", f"name one: {pools[0]}:{place}")
    if away := client.checkpoints_away():
        raise FleetError("; ".join(away), "`polyfleet up` brings back a node that is down")
    raise UserError(f"job {job} has no checkpoint", "`polyfleet checkpoint list` has those of other jobs")
