"""Carries out what the controller commands, each kind in threads of its own: a launch that takes minutes keeps no stop
waiting. What became of a command is told to the controller as a message; what is lost, it commands again.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from cluster.errors import FleetError, PolyfleetError
from orchestrator.core import commands as c
from orchestrator.core.commands import Command
from orchestrator.core.messages import (
    Fenced,
    LaunchFailed,
    Message,
    NodesAsked,
    NotRestarted,
    Released,
    Replicated,
    Stopped,
)
from orchestrator.runtime import autoscaler, fences, ray_capacity, reservations
from orchestrator.runtime.actors import first_line
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.checkpoint_replicator import Replicator
from orchestrator.runtime.jobs import Jobs
from orchestrator.runtime.launch import Launcher
from orchestrator.runtime.log_preservation import Keeping
from orchestrator.runtime.ray_calls import RAY
from orchestrator.runtime.repair import RepairThread
from orchestrator.store.event_store import EventStore

log = logging.getLogger(__name__)

LAUNCHES = 32
RELEASES = 4
ASK_S = 2.0 * autoscaler.LIMIT_S
COPIES = 4
"""No more are commanded at once (core/checkpoint_replication.py)."""
PLACE_S = 15.0
"""A release waits no longer for Ray than this."""


class _Occupied(FleetError):
    def __init__(self, place: str):
        why = f"its devices ({place}) are being reserved or released for another attempt since {PLACE_S:.0f} s"
        super().__init__(why, "it is tried again")
        self.args = (place,)


class Carrier:
    """Only the controller's thread calls `carry`. `keeping` keeps what is lost with nodes that may be given back."""

    def __init__(
        self,
        agents: Agents,
        launcher: Launcher,
        store: EventStore,
        jobs: Jobs,
        post: Callable[[Message], None],
        keeping: Keeping,
        repair: RepairThread | None = None,
    ):
        self.keeping = keeping
        self._repair = repair
        self._agents, self._launcher, self._store, self._jobs, self._post = agents, launcher, store, jobs, post
        self._launches = ThreadPoolExecutor(LAUNCHES, thread_name_prefix="launches")
        self._releases = ThreadPoolExecutor(RELEASES, thread_name_prefix="releases")
        self._copies = ThreadPoolExecutor(COPIES, thread_name_prefix="copies")
        self._taken: set[str] = set()
        self._places: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._ways: dict[type, Callable[[Any], None]] = {
            c.Launch: self._launch,
            c.Stop: self._stop,
            c.Forget: lambda f: keeping.before(f, lambda: self._forget(f)),
            c.Fence: self._fence,
            c.Release: self._release,
            c.MakeAgent: lambda m: agents.make(m.node, m.ray_id),
            c.RestartAgent: lambda r: agents.restart(r.node, r.ray_id, r.reason),
            c.RestartNode: self._restart_node,
            c.DropAgent: lambda d: agents.drop(d.node, d.ray_id),
            c.RestAgent: lambda r: agents.rest(r.node, r.ray_id),
            c.AskNodes: self._ask_nodes,
            c.StoreReport: self._report,
            c.Replicate: partial(self._in, self._copies, self._replicated),
            c.Refuse: lambda _: None,
            c.Warn: lambda w: log.warning("%s", w.text),
        }

    def carry(self, command: Command) -> None:
        self._ways[type(command)](command)

    def close(self) -> None:
        self.keeping.close()
        for threads in (self._launches, self._releases, self._copies):
            threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self, forget: c.Forget) -> None:
        self._agents.tell(forget.node, "forget", forget.job, forget.epoch, done=partial(_noted, forget))

    def _in(self, threads: ThreadPoolExecutor, carry: Callable[[Any], Message], command: Any) -> None:
        threads.submit(self._told, carry, command)

    def _told(self, carry: Callable[[Any], Message], command: Any) -> None:
        try:
            self._post(carry(command))
        except Exception:
            log.exception("%s could not be carried out", command)

    def _launch(self, launch: c.Launch) -> None:
        self._taken.add(launch.place)
        self._in(self._launches, self._launched, launch)

    def _launched(self, launch: c.Launch) -> Message:
        try:
            with self._alone_at(launch.place):
                return self._launcher.launch(launch)
        except _Occupied as e:
            return LaunchFailed(launch.job, launch.epoch, "launch", str(e))
        except Exception as e:
            log.exception("launching %s", launch.attempt)
            why = f"launching failed: {e!r}; its traceback is in the server's log"
            return LaunchFailed(launch.job, launch.epoch, "launch", why, launch.nodes)

    def _release(self, release: c.Release) -> None:
        self._taken.discard(release.place)
        self._in(self._releases, self._released, release)

    def _released(self, release: c.Release) -> Message:
        """Unless the next attempt has taken it over meanwhile."""
        try:
            with self._alone_at(release.place):
                if release.place not in self._taken:
                    reservations.release(release.place)
        except PolyfleetError as e:
            return Released(release.place, str(e), release.asked_s)
        return Released(release.place, asked_s=release.asked_s)

    def _replicated(self, asked: c.Replicate) -> Message:
        try:
            return Replicator(self._launcher.checkpoints).replicate(asked)
        except Exception as e:
            log.exception("copying a checkpoint of %s", asked.job)
            return Replicated(asked.job, asked.step, asked.node, error=f"internal error: {e!r}")

    @contextmanager
    def _alone_at(self, place: str) -> Iterator[None]:
        """Nobody else reserves or releases these devices meanwhile. Raises _Occupied."""
        lock = self._places[place]
        if not lock.acquire(timeout=PLACE_S):
            raise _Occupied(place)
        try:
            yield
        finally:
            lock.release()

    def _restart_node(self, restart: c.RestartNode) -> None:
        """Ray is asked once more: what a launch was told may be a minute old."""
        look = partial(ray_capacity.withholds, restart.ray_id)
        RAY.ask(f"list what {restart.node} holds", look, PLACE_S, partial(self._looked, restart))

    def _looked(self, restart: c.RestartNode, withholds: Any) -> None:
        node = self._agents.get(restart.node)
        same = node is not None and node.ray_id == restart.ray_id
        if withholds is not True or self._repair is None or not same:
            self._post(NotRestarted(restart.node, restart.ray_id))
        elif not self._repair.restart(restart.node, restart.reason):
            log.warning("node %s was started too often lately to be started again now", restart.node)
            self._post(NotRestarted(restart.node, restart.ray_id))

    def _stop(self, stop: c.Stop) -> None:
        def told(error: BaseException | None) -> None:
            self._post(Stopped(stop.node, stop.job, stop.epoch, stop.how, str(error) if error else "", stop.asked_s))

        self._agents.tell(stop.node, "stop", stop.job, stop.epoch, stop.how, done=told)

    def _fence(self, fence: c.Fence) -> None:
        change = fences.lower_to if fence.lower else fences.raise_to
        change(fence.job, fence.epoch, partial(self._fenced, fence))

    def _fenced(self, fence: c.Fence, stands: Any) -> None:
        if isinstance(stands, BaseException):
            self._post(Fenced(fence.job, fence.epoch, error=str(stands), asked_s=fence.asked_s))
        else:
            self._post(Fenced(fence.job, fence.epoch, stands, asked_s=fence.asked_s))

    def _ask_nodes(self, asked: c.AskNodes) -> None:
        RAY.ask("ask its autoscaler for nodes", partial(autoscaler.ask, asked.requests), ASK_S, self._asked)

    def _asked(self, failed: Any) -> None:
        told = isinstance(failed, BaseException)
        self._post(NodesAsked(first_line(failed)) if told else NodesAsked(failed=failed))

    def _report(self, report: c.StoreReport) -> None:
        self._store.report(
            report.job, report.epoch, report.metrics.get("step", 0), report.time_s, report.metrics, at=report.at
        )
        self._jobs.measured(report.job, report.metrics)


def _noted(command: Command, error: BaseException | None) -> None:
    if error is not None:
        log.info("%s: %s", command, error)
