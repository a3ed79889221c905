"""Derive findings about the server and its fleet from a health snapshot. Pure: data in, findings out."""

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.types import Finding
from orchestrator.core.fleet.leaked_devices import Leak
from orchestrator.core.timing import NODE_SILENT_S
from orchestrator.runtime.agents import code_delivery
from orchestrator.runtime.agents.agents import NO_FLEET
from orchestrator.runtime.agents.ray_calls import Blocked
from orchestrator.runtime.agents.ray_link import HEAD_GONE, HEAD_STARTS
from orchestrator.runtime.controller.inbox import Repair
from orchestrator.units import when

CYCLE_LATE_S = 5.0
STARTING_S = 60.0
PROBLEM_S = 3.0
"""Seconds after which trouble is reported: joining a cluster takes one second."""

LOW_DISK_BYTES = 256 << 20
MAX_NAMED = 5
AGAIN = "nothing to do: the server retries; see its log and the logs named there"
NO_AGENT_REMEDY = f"{code_delivery.REMEDY}; the server retries every few minutes"
GIB = 1 << 30
MIB = 1 << 20
NodeFinding = tuple[str, Finding]


@dataclass(frozen=True, slots=True)
class ControllerHealth:
    """State of the controller.

    `trouble`: why no fleet is served, for `trouble_s`. `holding`: why no job is placed. `failing`: error of the last
    cycle. `overtaken`: another server controls the fleet, and `trouble` says what to do. `gap`: 0 to 1, upper bound of
    what another decision than the last full one could gain, by the measure of `policy`; 0 if the policy is an order.
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
class NodeHealth:
    """State of a node.

    `unknown`: attempts there that are not in the database. `unmade`: why it has no agent.
    """

    node: str
    lost: str
    ready: bool
    silent_s: float
    unknown: tuple[str, ...] = ()
    unmade: str = ""


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """State of the job store.

    `damaged`: names of damaged rows, at most NAMED_ROWS; `damaged_rows`: number of all.
    """

    where: str
    error: str = ""
    failed_s: float = 0.0
    size_bytes: int | None = None
    free_bytes: int | None = None
    damaged: tuple[str, ...] = ()
    damaged_rows: int = 0
    reports_lost: int = 0


@dataclass(frozen=True, slots=True)
class HealthSnapshot:
    """Health snapshot of the server and its fleet.

    `repairs`: recent restarts. `not_repaired`: why lost nodes are not restarted now. `replaced`: this
    database is not the one that the fleet was started with. `repairing`: the server restarts lost nodes.
    """

    controller: ControllerHealth
    store: StoreHealth
    blocked: tuple[Blocked, ...] = ()
    exhausted: bool = False
    nodes: tuple[NodeHealth, ...] = ()
    leaks: tuple[Leak, ...] = ()
    repairs: tuple[Repair, ...] = ()
    not_repaired: tuple[str, ...] = ()
    replaced: bool = False
    repairing: bool = True


def findings(snapshot: HealthSnapshot) -> list[NodeFinding]:
    """(node or "", finding), errors first."""
    order = {"error": 0, "warning": 1, "info": 2}
    problems = [
        *_controller(snapshot),
        *_head(snapshot),
        *_nodes(snapshot),
        *_untracked(snapshot),
        *_leaks(snapshot),
        *_store(snapshot.store),
    ]
    repaired = [
        (r.node, Finding("info", "repair", f"{r.message} at {when(r.repaired_at)} UTC")) for r in snapshot.repairs
    ]
    waiting = [
        (
            "",
            Finding(
                "warning", "repair", message, "nothing to do: the server retries; see its log and the logs named here"
            ),
        )
        for message in snapshot.not_repaired
    ]
    return sorted([*problems, *waiting, *repaired], key=lambda pair: order[pair[1].level])


def age(seconds: float) -> str:
    """`42 s`, `7 min`, `3 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _controller(snapshot: HealthSnapshot) -> Iterator[NodeFinding]:
    controller = snapshot.controller
    if controller.policy_fault:
        message = f"{controller.policy_fault}; until it is fixed, jobs are served in the order of submission"
        yield (
            "",
            Finding(
                "error",
                "policy",
                message,
                "fix or replace the policy, or set another `scheduler.policy` in the fleet file",
            ),
        )
    if controller.turn_age_s > CYCLE_LATE_S:
        message = f"the controller has not finished a cycle for {age(controller.turn_age_s)}: {controller.doing}"
        remedy = "see the server's log; run `polyfleet server stop` to replace the server: jobs keep running"
        yield "", Finding("error", "controller", message, remedy)
    if controller.failing and controller.failures > 1:
        message = f"the last {controller.failures} cycles failed: {controller.failing}"
        yield "", Finding("error", "controller", message, "its traceback is in the server's log")


def _head(snapshot: HealthSnapshot) -> Iterator[NodeFinding]:
    controller = snapshot.controller
    if controller.trouble and controller.trouble != NO_FLEET and controller.trouble_s > PROBLEM_S:
        remedy = "run `polyfleet up`" if not snapshot.repairing else "wait, or run `polyfleet up`"
        yield "", Finding("error", "fleet", controller.trouble, "" if controller.overtaken else remedy)
    if controller.holding:
        message = f"{controller.holding}: running jobs continue, no job is started"
        yield "", Finding("error", "head", message, _remedy(controller.holding, snapshot.repairing))
    if snapshot.blocked:
        named = snapshot.blocked[:MAX_NAMED]
        calls = ", ".join(f"{call.name} for {age(call.waiting_s)}" for call in named)
        more = f" and {len(snapshot.blocked) - len(named)} more" if len(snapshot.blocked) > len(named) else ""
        message = f"Ray has not answered: {calls}{more}"
        message += "; no thread is left for other calls" if snapshot.exhausted else ""
        yield (
            "",
            Finding(
                "error" if snapshot.exhausted else "warning",
                "ray",
                message,
                "wait: the calls end when Ray's head responds",
            ),
        )


def _remedy(holding: str, repairing: bool) -> str:
    if holding == HEAD_STARTS:
        return "wait until it has started"
    if holding != HEAD_GONE:
        return "check that the head's gcs_server is running; if it has ended, run `polyfleet up`"
    return "nothing to do: the server restarts it" if repairing else "run `polyfleet up` to restart it"


def _nodes(snapshot: HealthSnapshot) -> Iterator[NodeFinding]:
    for node in snapshot.nodes:
        if node.unmade:
            yield node.node, Finding("error", "agent", node.unmade, NO_AGENT_REMEDY)
        elif node.lost:
            remedy = (
                "nothing to do: the server restarts it" if snapshot.repairing else "run `polyfleet up` to restart it"
            )
            yield node.node, Finding("error", "node", f"lost: {node.lost}", remedy)
        elif node.silent_s > (NODE_SILENT_S if node.ready else STARTING_S):
            message = f"its agent has not answered for {age(node.silent_s)}"
            yield node.node, Finding("warning", "agent", message, "nothing to do: it is restarted if it stays silent")


def _untracked(snapshot: HealthSnapshot) -> Iterator[NodeFinding]:
    unknown = [(node.node, key) for node in snapshot.nodes for key in node.unknown]
    if not unknown:
        return
    cause = (
        "the database of this home was replaced or emptied"
        if snapshot.replaced
        else "this database is an older copy, or another home uses this cluster"
    )
    names = ", ".join(f"{key} on {node}" for node, key in unknown[:MAX_NAMED])
    more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
    count_text = (
        f"{len(unknown)} attempts of jobs that it does not contain are running"
        if unknown[1:]
        else "1 attempt of a job that it does not contain is running"
    )
    message = f"{cause}: {count_text} ({names}{more}); no job is started on those nodes"
    remedy = "run `polyfleet server stop` and restore the database, or run `polyfleet down` to end these attempts"
    yield "", Finding("error", "store", message, remedy)


def _leaks(snapshot: HealthSnapshot) -> Iterator[NodeFinding]:
    for leak in snapshot.leaks:
        remedy = "if it stays, run `polyfleet down`, then `polyfleet up`"
        if leak.node:
            remedy = "nothing to do: it is restarted once it is idle" if snapshot.repairing else "restart that Ray node"
        yield leak.node, Finding("warning", "allocation", f"{leak.holder}: {leak.reason}", remedy)


def _store(store: StoreHealth) -> Iterator[NodeFinding]:
    if store.error:
        when = f"its last write failed {age(store.failed_s)} ago" if store.failed_s else "it cannot be written"
        message = f"{when}: {store.error}"
        yield "", Finding("error", "store", message, "no job is accepted or placed until a write succeeds")
    if store.free_bytes is not None and store.free_bytes < LOW_DISK_BYTES:
        size = f", which takes {(store.size_bytes or 0) / MIB:.0f} MiB"
        message = f"{store.free_bytes / MIB:.0f} MiB are free on the disk of {store.where}{size}"
        yield "", Finding("warning", "store", message, "free space there: no job is accepted while the disk is full")
    for row in store.damaged[:MAX_NAMED]:
        remedy = "an affected job was cancelled: submit it again, or restore the database from a backup"
        yield "", Finding("error", "store", f"{store.where}: {row}", remedy)
    if (more := store.damaged_rows - MAX_NAMED) > 0:
        yield "", Finding("error", "store", f"{store.where}: {more} more damaged rows", "the server's log names them")
    if store.reports_lost:
        message = f"{store.reports_lost} metric records were dropped since the server's start"
        yield "", Finding("info", "store", message, "the disk was full, or jobs send metrics faster than it can write")
