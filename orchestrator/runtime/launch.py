"""Carrying out one placement: reserve, bring checkpoint and code to the nodes, give the orders. Runs in a thread of its
own; what concerns several nodes is done on all of them at once.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster import places
from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError, SpecError, UserError
from cluster.places import Place
from orchestrator.checkpoints import Checkpoints, Progress
from orchestrator.core.commands import Launch
from orchestrator.core.messages import Launched, LaunchFailed
from orchestrator.runtime import fences, reservations
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.packages import Packages
from orchestrator.runtime.room import NoRoom
from orchestrator.runtime.secrets import resolve_secrets
from workers.errors import CheckpointError
from workers.messages import Order

MOST_NODES_AT_ONCE = 32
"""Asked side by side by one launch."""


RESUME_FROM = "checkpoint.resume_from"


class UnusableError(SpecError):
    """What the job was told to start from is not there: its user alone can help."""

    def __init__(self, message: str, remedy: str):
        super().__init__(RESUME_FROM, message, remedy)
        self.args = (message, remedy)


class NotStarted(Exception):
    """Some node refused, or gave no answer. `nodes` are those where ranks may have been started, `failed` those of them
    that gave no answer.
    """

    def __init__(self, cause: PolyfleetError, nodes: tuple[str, ...], failed: tuple[str, ...]):
        super().__init__(str(cause))
        self.cause, self.nodes, self.failed = cause, nodes, failed


@dataclass(frozen=True)
class Launcher:
    """What a placement needs to be carried out. `doing` tells what each launch does now, by the key of its attempt."""

    agents: Agents
    packages: Packages
    checkpoints: Checkpoints
    doing: dict[str, str] = field(default_factory=dict)

    def launch(self, asked: Launch) -> Launched | LaunchFailed:
        """Start every part. Raises nothing that is foreseen."""
        try:
            return self._launch(asked)
        finally:
            self.doing.pop(asked.attempt, None)

    def _launch(self, asked: Launch) -> Launched | LaunchFailed:
        try:
            self._does(asked, "waits for Ray to reserve its devices")
            self._reserve(asked)
            self._does(asked, "waits for Ray to raise its fence")
            if stands := fences.take(asked.job, asked.epoch, asked.fenced):
                why = f"its fence stands at epoch {stands} already"
                return LaunchFailed(asked.job, asked.epoch, "launch", why, seen=stands)
            resumed = self._brought(asked)
            self._start(asked, resumed)
        except NotStarted as e:
            return replace(_failed(asked, e.cause), nodes=e.nodes, failed=e.failed)
        except NoRoom as e:
            return replace(_failed(asked, e), short=e.short, unheld=e.unheld)
        except PolyfleetError as e:
            return _failed(asked, e)
        return Launched(asked.job, asked.epoch, resumed["step"] if resumed else None)

    def _does(self, asked: Launch, what: str) -> None:
        self.doing[asked.attempt] = what

    def _reserve(self, asked: Launch) -> None:
        ids = [self.agents[node].ray_id for node in asked.nodes]
        try:
            reservations.reserve(asked.place, [dict(bundle) for bundle in asked.bundles], ids)
        except NoRoom as e:
            raise e.named(dict(zip(ids, asked.nodes, strict=True))) from e

    def _start(self, asked: Launch, resumed: dict[str, Any] | None) -> None:
        """Nothing is started before every node has the code. Raises NotStarted, PolyfleetError."""
        secrets = resolve_secrets(asked.secrets)
        if asked.package:
            self._does(asked, "sends its code to its nodes")
            send = partial(self.packages.send, asked.package, agents=self.agents)
            _raise_first(self._on_each(dict.fromkeys(asked.nodes), send))
        self._does(asked, f"waits for {', '.join(asked.nodes)} to start its ranks")
        alone = len(asked.nodes) == 1  # its agent says where its ranks meet
        address, port = ("", 0) if alone else self.agents.call(asked.nodes[0], "meeting_place")
        given = {
            node: replace(order, master_address=address, master_port=port, resume_from=_resume(order, resumed))
            for node, order in zip(asked.nodes, asked.orders, strict=True)
        }
        failed = self._on_each(given, lambda node: self._order(node, given[node], secrets))
        if failed:
            refused = {node for node, e in failed.items() if isinstance(e, UserError | Conflict)}
            first = next(failed[node] for node in asked.nodes if node in failed)
            maybe = tuple(node for node in asked.nodes if node not in refused)
            raise NotStarted(first, maybe, tuple(node for node in maybe if node in failed))

    def _order(self, node: str, order: Order, secrets: Mapping[str, str]) -> None:
        self.agents.call(node, "start", self.agents.generation, order.to_plain(), dict(secrets))

    def _on_each(self, nodes: Iterable[str], do: Callable[[str], None]) -> dict[str, PolyfleetError]:
        """Side by side; what went wrong, by node."""
        names = list(nodes)
        if len(names) == 1:
            return {name: e for name in names if (e := _error(do, name)) is not None}
        with ThreadPoolExecutor(min(len(names), MOST_NODES_AT_ONCE)) as pool:
            errors = pool.map(lambda name: _error(do, name), names)
        return {name: e for name, e in zip(names, errors, strict=True) if e is not None}

    def _brought(self, asked: Launch) -> dict[str, Any] | None:
        """As `_bring_checkpoint`. What is in its way is trouble of the fleet, FleetError: tried again; not so what
        is absent (UnusableError) or damaged (CheckpointError).
        """
        try:
            return self._bring_checkpoint(asked)
        except (UnusableError, CheckpointError):
            raise
        except UserError as e:
            raise FleetError(e.message, e.remedy) from e

    def _bring_checkpoint(self, asked: Launch) -> dict[str, Any] | None:
        """The job's newest checkpoint, else the one it was told to start from, made readable in the pool it runs in.

        Its bytes are proved while they move, or by the ranks that load them. One that is damaged is marked where it
        lies, and the one before it moves.
        """
        tried = set()
        while True:
            self._does(asked, "looks for the newest checkpoint")
            source = self._newest(asked)
            if source is None and asked.resume_from:
                source = self._asked_for(asked.resume_from, asked.pool)
            if source is None or source["pool"] == asked.pool:
                return source
            final = f"{asked.job}/{Path(source['path']).name}"
            there = Place(source["pool"], source["path"])
            reader = self._reader(source["pool"])
            try:
                self.checkpoints.move((reader, there), asked.nodes[0], final, self._copies(asked, source))
            except CheckpointError as e:
                if there in tried:
                    raise
                self._does(asked, f"reads all of {there}, which could not be copied")
                if self.checkpoints.is_sound(reader, there):
                    raise FleetError(f"{there} is sound, and did not reach {asked.nodes[0]}: {e.message}") from e
                tried.add(there)
                continue
            return source | {"pool": asked.pool, "path": final}

    def _copies(self, asked: Launch, source: dict[str, Any]) -> Progress:
        what = f"copies step {source['step']} from {source['pool']}"
        self._does(asked, what)
        return lambda done, total: self._does(asked, f"{what} ({done >> 20} of {total >> 20} MiB)")

    def _newest(self, asked: Launch) -> dict[str, Any] | None:
        """Of all pools the job has been to: an attempt cut off from us may have saved after it last reported.

        Raises FleetError when a newer one is known where no node can look: progress is not thrown away.
        """
        pools = {pool: self._readers(pool) for pool in asked.visited}
        found = [self.checkpoints.newest(nodes[0], Place(pool, asked.job)) for pool, nodes in pools.items() if nodes]
        newest = max((f for f in found if f), key=lambda f: int(f["step"]), default=None)
        known = asked.known
        unseen = known is not None and not pools.get(known["pool"])
        if known and unseen and (newest is None or newest["step"] < known["step"]):
            raise FleetError(
                f"the newest checkpoint (step {known['step']}) lies in pool {known['pool']}, of which no node is up",
                "`polyfleet up` restarts lost nodes; the job goes on from it then",
            )
        return newest

    def _reader(self, pool: str) -> str:
        """Raises FleetError while there is none."""
        readers = self._readers(pool)
        if not readers:
            raise FleetError(f"no node of pool {pool!r} is up to read the checkpoint from", "`polyfleet status`")
        return readers[0]

    def _readers(self, pool: str) -> list[str]:
        """Nodes that see the checkpoints of `pool`: its own first, then others of the same machine."""
        own = [name for name, _ in self.agents.of_pool(pool)]
        return own + [name for name, node in self.agents.ready() if node.facts and pool in node.facts.neighbours]

    def _asked_for(self, text: str, pool: str) -> dict[str, Any]:
        """Raises UnusableError once nobody is left who may have it."""
        reference = places.in_pool(text, RESUME_FROM, pool)
        if not self.agents.of_pool(reference.pool):
            why = f"{RESUME_FROM}: no node of pool {reference.pool!r} is up to read {reference} from"
            raise FleetError(why, "`polyfleet status` lists the nodes; the job starts once one is up")
        try:
            shown = self.checkpoints.show(str(reference))
        except NotFound as e:
            if untold := self._untold(reference.pool):
                why = f"{RESUME_FROM}: {e.message}, and {', '.join(untold)} may have it and cannot be asked now"
                raise FleetError(why, "`polyfleet status` lists the nodes") from e
            raise UnusableError(e.message, e.remedy) from None
        return {"pool": reference.pool, "path": shown["path"], "step": shown["step"]}

    def _untold(self, pool: str) -> list[str]:
        """Nodes that are or may be of `pool` and cannot be asked: not all of them need see the same storage."""
        nodes = self.agents.items()
        return [name for name, node in nodes if not node.ready and (not node.facts or node.facts.pool == pool)]


def _resume(order: Order, resumed: dict[str, Any] | None) -> str:
    """A checkpoint's path as the node sees it: beside the job's own folder, in the pool's storage."""
    return str(Path(order.checkpoint_root).parent / resumed["path"]) if resumed else ""


def _failed(asked: Launch, error: PolyfleetError) -> LaunchFailed:
    """What the user got wrong ends the job; trouble of the fleet does not. A node that has seen a newer epoch refuses
    this one as past.
    """
    of_the_user = isinstance(error, UserError) and not isinstance(error, NotFound | Conflict)
    seen = asked.epoch if isinstance(error, Conflict) else 0
    return LaunchFailed(asked.job, asked.epoch, "user" if of_the_user else "launch", str(error), seen=seen)


def _error(do: Callable[[str], None], node: str) -> PolyfleetError | None:
    try:
        do(node)
    except PolyfleetError as e:
        return e
    return None


def _raise_first(failed: Mapping[str, PolyfleetError]) -> None:
    for error in failed.values():
        raise error
