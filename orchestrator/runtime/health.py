"""What is wrong with the server and its fleet, from what was seen of them. Pure: data in, findings out."""

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.types import Finding
from orchestrator.core.leaked_devices import Leak
from orchestrator.core.timing import NODE_SILENT_S
from orchestrator.runtime import code_delivery
from orchestrator.runtime.agents import NO_FLEET
from orchestrator.runtime.ray_calls import Blocked
from orchestrator.runtime.ray_link import HEAD_GONE, HEAD_STARTS

TURN_LATE_S = 5.0
STARTING_S = 60.0
TROUBLE_S = 3.0
"""To join a cluster takes a second; longer is worth telling."""

LITTLE_ROOM_BYTES = 256 << 20
NAMED = 5
AGAIN = "it is tried again by itself; the server's log and those it names tell more"
UNMADE_REMEDY = f"{code_delivery.REMEDY}; it is tried again every few minutes"
GIB = 1 << 30
MIB = 1 << 20
NoteOf = tuple[str, Finding]


@dataclass(frozen=True, slots=True)
class ControllerSeen:
    """`trouble` is why no fleet is served, for `trouble_s`; `holding` why nothing is placed; `failing` the last turn's
    error. `overtaken`: another server controls the fleet, and `trouble` says what to do. `gap`: 0 to 1, what
    any other than the last full decision could gain at most, by the measure of `policy`; 0 where order decides.
    """

    turn_age_s: float
    doing: str
    failing: str = ""
    failures: int = 0
    trouble: str = ""
    trouble_s: float = 0.0
    holding: str = ""
    overtaken: bool = False
    policy_fault: str = ""
    policy: str = ""
    gap: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """`unknown`: attempts that run there and are not in the database. `unmade`: why it has no agent."""

    node: str
    lost: str
    ready: bool
    silent_s: float
    unknown: tuple[str, ...] = ()
    unmade: str = ""


@dataclass(frozen=True, slots=True)
class StoreSeen:
    """`damaged` are the rows by name, `damaged_rows` how many there are."""

    where: str
    error: str = ""
    failed_s: float = 0.0
    size_bytes: int | None = None
    free_bytes: int | None = None
    damaged: tuple[str, ...] = ()
    damaged_rows: int = 0
    reports_lost: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """`repairs`: (when, subject, sentence). `not_repaired`: why lost nodes are not started now. `replaced`: this
    database is not the one the fleet began with. `repairing`: the server starts lost nodes again.
    """

    controller: ControllerSeen
    store: StoreSeen
    blocked: tuple[Blocked, ...] = ()
    exhausted: bool = False
    nodes: tuple[NodeSeen, ...] = ()
    leaks: tuple[Leak, ...] = ()
    repairs: tuple[tuple[str, str, str], ...] = ()
    not_repaired: tuple[str, ...] = ()
    replaced: bool = False
    repairing: bool = True


def findings(seen: Seen) -> list[NoteOf]:
    """(node or "", finding), errors first."""
    order = {"error": 0, "warning": 1, "info": 2}
    found = [*_controller(seen), *_head(seen), *_nodes(seen), *_strangers(seen), *_leaks(seen), *_store(seen.store)]
    repaired = [(node, Finding("info", "repair", f"{said} at {when}")) for when, node, said in seen.repairs]
    waiting = [
        (
            "",
            Finding(
                "warning", "repair", said, "it is tried again by itself; the logs it names and the server's tell more"
            ),
        )
        for said in seen.not_repaired
    ]
    return sorted([*found, *waiting, *repaired], key=lambda pair: order[pair[1].level])


def age(seconds: float) -> str:
    """`42 s`, `7 min`, `3 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _controller(seen: Seen) -> Iterator[NoteOf]:
    own = seen.controller
    if own.policy_fault:
        said = f"{own.policy_fault}; jobs are served in the order of submission meanwhile"
        yield "", Finding("error", "policy", said, "fix or replace it, or name another `policy` in the fleet file")
    if own.turn_age_s > TURN_LATE_S:
        said = f"the controller has not finished a cycle for {age(own.turn_age_s)}: {own.doing}"
        remedy = "see the server's log; `polyfleet server stop` stops it: jobs keep running, the next server continues"
        yield "", Finding("error", "controller", said, remedy)
    if own.failing and own.failures > 1:
        said = f"the last {own.failures} turns failed: {own.failing}"
        yield "", Finding("error", "controller", said, "its traceback is in the server's log")


def _head(seen: Seen) -> Iterator[NoteOf]:
    own = seen.controller
    if own.trouble and own.trouble != NO_FLEET and own.trouble_s > TROUBLE_S:
        remedy = "`polyfleet up`" if not seen.repairing else "wait, or run `polyfleet up`"
        yield "", Finding("error", "fleet", own.trouble, "" if own.overtaken else remedy)
    if own.holding:
        said = f"{own.holding}: running jobs go on, nothing new is started"
        yield "", Finding("error", "head", said, _remedy(own.holding, seen.repairing))
    if seen.blocked:
        first = seen.blocked[:NAMED]
        calls = ", ".join(f"{call.name} for {age(call.waiting_s)}" for call in first)
        more = f" and {len(seen.blocked) - len(first)} more" if len(seen.blocked) > len(first) else ""
        said = f"calls into Ray without an answer: {calls}{more}"
        said += "; no thread is left for others" if seen.exhausted else ""
        yield (
            "",
            Finding("error" if seen.exhausted else "warning", "ray", said, "they end when Ray's head answers again"),
        )


def _remedy(holding: str, repairing: bool) -> str:
    if holding == HEAD_STARTS:
        return "wait for it"
    if holding != HEAD_GONE:
        return "see whether its gcs_server runs; if it has ended, the server or `polyfleet up` starts it again"
    return "the server starts it again" if repairing else "`polyfleet up` starts it again"


def _nodes(seen: Seen) -> Iterator[NoteOf]:
    for node in seen.nodes:
        if node.unmade:
            yield node.node, Finding("error", "agent", node.unmade, UNMADE_REMEDY)
        elif node.lost:
            remedy = "the server starts it again" if seen.repairing else "`polyfleet up` restarts lost nodes"
            yield node.node, Finding("error", "node", f"lost: {node.lost}", remedy)
        elif node.silent_s > (NODE_SILENT_S if node.ready else STARTING_S):
            said = f"its agent has not answered for {age(node.silent_s)}"
            yield node.node, Finding("warning", "agent", said, "it is started again if it stays silent")


def _strangers(seen: Seen) -> Iterator[NoteOf]:
    there = [(node.node, key) for node in seen.nodes for key in node.unknown]
    if not there:
        return
    cause = (
        "the database of this home was replaced or emptied"
        if seen.replaced
        else "this database is an older copy, or another home uses this cluster"
    )
    names = ", ".join(f"{key} on {node}" for node, key in there[:NAMED])
    more = f" and {len(there) - NAMED} more" if len(there) > NAMED else ""
    many = (
        f"{len(there)} attempts of jobs it does not know run"
        if there[1:]
        else "1 attempt of a job it does not know runs"
    )
    said = f"{cause}: {many} ({names}{more}); nothing new is started on those nodes"
    remedy = "`polyfleet server stop` and restore the database, or `polyfleet down` ends them"
    yield "", Finding("error", "store", said, remedy)


def _leaks(seen: Seen) -> Iterator[NoteOf]:
    for leak in seen.leaks:
        remedy = "`polyfleet down` and `up` free what nothing else does"
        if leak.node:
            remedy = "it is started again once nothing runs there" if seen.repairing else "start that Ray node again"
        yield leak.node, Finding("warning", "allocation", f"{leak.holder}: {leak.reason}", remedy)


def _store(store: StoreSeen) -> Iterator[NoteOf]:
    if store.error:
        when = f"its last write failed {age(store.failed_s)} ago" if store.failed_s else "it cannot be written"
        said = f"{when}: {store.error}"
        yield "", Finding("error", "store", said, "nothing is accepted or placed until a write succeeds")
    if store.free_bytes is not None and store.free_bytes < LITTLE_ROOM_BYTES:
        size = f", which takes {(store.size_bytes or 0) / MIB:.0f} MiB"
        said = f"{store.free_bytes / MIB:.0f} MiB are free on the disk of {store.where}{size}"
        yield "", Finding("warning", "store", said, "free space there: jobs cannot be accepted on a full disk")
    for row in store.damaged[:NAMED]:
        remedy = "a job concerned was cancelled: submit it again, or restore the database from a backup"
        yield "", Finding("error", "store", f"{store.where}: {row}", remedy)
    if (more := store.damaged_rows - NAMED) > 0:
        yield "", Finding("error", "store", f"{store.where}: {more} more damaged rows", "the server's log names them")
    if store.reports_lost:
        said = f"{store.reports_lost} reports of metrics were dropped since the server's start"
        yield "", Finding("info", "store", said, "the disk was full, or jobs report faster than it writes")
