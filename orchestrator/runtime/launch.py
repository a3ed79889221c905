"""Carrying out one placement: reserve, bring checkpoint and code to the nodes, give the orders. Runs in a thread of its
own; what concerns several nodes is done on all of them at once.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster.errors import Conflict, NotFound, PolyfleetError, UserError
from orchestrator.checkpoints import CheckpointService
from orchestrator.core.commands import Launch
from orchestrator.core.messages import Launched, LaunchFailed
from orchestrator.runtime import fences, reservations
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.code_archives import Packages
from orchestrator.runtime.data_moves import DataMoves
from orchestrator.runtime.file_moves import FileMoves
from orchestrator.runtime.ray_capacity import NoRoom
from orchestrator.runtime.resume_source import Bringer
from orchestrator.runtime.script_resume import HandedOn, hand_on
from orchestrator.runtime.secrets import resolve_secrets
from workers.errors import EpochPast
from workers.messages import Order

MOST_NODES_AT_ONCE = 32
"""Asked side by side by one launch."""


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
    checkpoints: CheckpointService
    data: DataMoves
    doing: dict[str, str] = field(default_factory=dict)

    @property
    def _bringer(self) -> Bringer:
        return Bringer(self.agents, self.checkpoints)

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
                why = f"attempt {stands} of it may have run before: its fence stands there already"
                return LaunchFailed(asked.job, asked.epoch, "launch", why, seen=stands)
            brought = self._bringer.bring(asked, partial(self._does, asked))
            missed_files = FileMoves(self.agents, self.checkpoints.pace).bring(asked, partial(self._does, asked))
            handed = hand_on(self.agents, asked, partial(self._does, asked))
            mounts = self.data.bring(asked, partial(self._does, asked))
            ready = replace(asked, orders=tuple(replace(order, data=mounts) for order in asked.orders))
            self._start(ready, brought.found, handed)
        except NotStarted as e:
            return replace(_failed(asked, e.cause), nodes=e.nodes, failed=e.failed)
        except NoRoom as e:
            return replace(_failed(asked, e), short=e.short, unheld=e.unheld)
        except PolyfleetError as e:
            return _failed(asked, e)
        step = brought.found["step"] if brought.found else None
        source = f"{brought.found['pool']}:{brought.found['path']}" if brought.found else ""
        told = {"missed": brought.missed, "missed_files": missed_files, "script": handed.text, "source": source}
        return Launched(asked.job, asked.epoch, step, **told)

    def _does(self, asked: Launch, what: str) -> None:
        self.doing[asked.attempt] = what

    def _reserve(self, asked: Launch) -> None:
        ids = [self.agents[node].ray_id for node in asked.nodes]
        try:
            reservations.reserve(asked.place, [dict(bundle) for bundle in asked.bundles], ids)
        except NoRoom as e:
            raise e.named(dict(zip(ids, asked.nodes, strict=True))) from e

    def _start(self, asked: Launch, resumed: dict[str, Any] | None, handed: HandedOn) -> None:
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
            for node, order in zip(asked.nodes, map(handed.given_to, asked.orders), strict=True)
        }
        failed = self._on_each(given, lambda node: self._order(node, given[node], secrets))
        if failed:
            refused = {node for node, e in failed.items() if isinstance(e, UserError | Conflict)}
            causes = [failed[node] for node in asked.nodes if node in failed]
            first = next((e for e in causes if isinstance(e, EpochPast)), causes[0])
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


def _resume(order: Order, resumed: dict[str, Any] | None) -> str:
    """A checkpoint's path as the node sees it: beside the job's own folder, in the pool's storage."""
    return str(Path(order.checkpoint_root).parent / resumed["path"]) if resumed else ""


def _failed(asked: Launch, error: PolyfleetError) -> LaunchFailed:
    """What the user got wrong ends the job; trouble of the fleet does not."""
    of_the_user = isinstance(error, UserError) and not isinstance(error, NotFound | Conflict)
    seen = error.newest if isinstance(error, EpochPast) else 0
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
