"""Executes the controller's commands.

Each kind has its own threads: a launch that takes minutes delays no stop.

The result of a command is posted to the controller as a message. If a result is lost, the controller commands it again.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.errors import FleetError, PolyfleetError
from orchestrator.core.controller import commands as c
from orchestrator.core.controller.commands import Command
from orchestrator.core.controller.messages import (
    FenceAnswered,
    LaunchFailed,
    Message,
    NodeNotRestarted,
    NodeRequestAnswered,
    ReleaseAnswered,
    Replicated,
    StopAnswered,
)
from orchestrator.runtime.agents import autoscaler, fences, ray_capacity, reservations
from orchestrator.runtime.agents.actors import first_line
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.agents.ray_calls import RAY
from orchestrator.runtime.checkpoints.checkpoint_replicator import Replicator
from orchestrator.runtime.controller.launch import Launcher
from orchestrator.runtime.controller.repair import RepairThread
from orchestrator.runtime.jobs.log_preservation import LogPreservation

log = logging.getLogger(__name__)

LAUNCHES = 32
RELEASES = 4
REQUEST_NODES_S = 2.0 * autoscaler.LIMIT_S
COPIES = 4
"""Maximum number of copies that core/step/checkpoint_replication.py commands at once."""
DEVICES_LOCK_S = 15.0
"""Seconds that a launch or release waits for another one on the same devices."""


class _DevicesBusy(FleetError):
    def __init__(self, allocation_name: str):
        super().__init__(
            f"its devices ({allocation_name}) are still being reserved or released for another attempt"
            f" after {DEVICES_LOCK_S:.0f} s",
            "nothing to do: the server tries again",
        )
        self.args = (allocation_name,)


class CommandExecutor:
    """Executes all commands but StoreReport, which StepBatch executes; only the controller's thread calls `execute`.

    `log_preservation` copies logs that would be lost with nodes that may be released.
    """

    def __init__(
        self,
        agents: Agents,
        launcher: Launcher,
        post: Callable[[Message], None],
        log_preservation: LogPreservation,
        repair: RepairThread | None = None,
    ):
        self.log_preservation = log_preservation
        self._repair = repair
        self._agents, self._launcher, self._post = agents, launcher, post
        self._launches = ThreadPoolExecutor(LAUNCHES, thread_name_prefix="launches")
        self._releases = ThreadPoolExecutor(RELEASES, thread_name_prefix="releases")
        self._copies = ThreadPoolExecutor(COPIES, thread_name_prefix="copies")
        self._allocations_in_use: set[str] = set()
        self._allocation_locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._handlers: dict[type, Callable[[Any], None]] = {
            c.Launch: self._launch,
            c.Stop: self._stop,
            c.RemoveFiles: lambda f: log_preservation.preserve_before(f, lambda: self._remove_files(f)),
            c.Fence: self._fence,
            c.Release: self._release,
            c.StartAgent: lambda m: agents.start(m.node, m.ray_id),
            c.RestartAgent: lambda r: agents.restart(r.node, r.ray_id, r.reason),
            c.RestartNode: self._restart_node,
            c.UnwatchAgent: lambda d: agents.unwatch(d.node, d.ray_id),
            c.EndIdleAgent: lambda r: agents.rest(r.node, r.ray_id),
            c.RequestNodes: self._request_nodes,
            c.Replicate: partial(self._submit, self._copies, self._run_replication),
            c.Reject: lambda _: None,
            c.LogWarning: lambda w: log.warning("%s", w.text),
        }

    def execute(self, command: Command) -> None:
        self._handlers[type(command)](command)

    def close(self) -> None:
        self.log_preservation.close()
        for threads in (self._launches, self._releases, self._copies):
            threads.shutdown(wait=False, cancel_futures=True)

    def _remove_files(self, command: c.RemoveFiles) -> None:
        self._agents.call_async(
            command.node, "remove_shared_files", command.job, command.epoch, done=partial(_log_error, command)
        )

    def _submit(self, threads: ThreadPoolExecutor, run: Callable[[Any], Message], command: Any) -> None:
        threads.submit(self._post_result, run, command)

    def _post_result(self, run: Callable[[Any], Message], command: Any) -> None:
        try:
            self._post(run(command))
        except Exception:
            log.exception("%s could not be executed", command)

    def _launch(self, launch: c.Launch) -> None:
        self._allocations_in_use.add(launch.reservation_name)
        self._submit(self._launches, self._run_launch, launch)

    def _run_launch(self, launch: c.Launch) -> Message:
        try:
            with self._lock_devices(launch.reservation_name):
                return replace(self._launcher.launch(launch), replies_to=launch.number)
        except _DevicesBusy as e:
            return LaunchFailed(launch.job, launch.epoch, "launch", str(e), replies_to=launch.number)
        except Exception as e:
            log.exception("launching %s failed", launch.attempt)
            message = f"launching failed: {e!r}; its traceback is in the server's log"
            return LaunchFailed(launch.job, launch.epoch, "launch", message, launch.nodes, replies_to=launch.number)

    def _release(self, release: c.Release) -> None:
        self._allocations_in_use.discard(release.reservation_name)
        self._submit(self._releases, self._run_release, release)

    def _run_release(self, command: c.Release) -> Message:
        """Release devices, unless the next attempt uses their reservation."""
        try:
            with self._lock_devices(command.reservation_name):
                if command.reservation_name not in self._allocations_in_use:
                    reservations.release(command.reservation_name)
        except PolyfleetError as e:
            return ReleaseAnswered(command.reservation_name, str(e), command.requested_s, command.number)
        return ReleaseAnswered(command.reservation_name, "", command.requested_s, command.number)

    def _run_replication(self, command: c.Replicate) -> Message:
        try:
            return replace(Replicator(self._launcher.checkpoints).replicate(command), replies_to=command.number)
        except Exception as e:
            log.exception("copying a checkpoint of %s failed", command.job)
            error = f"internal error: {e!r}"
            return Replicated(command.job, command.step, command.node, error=error, replies_to=command.number)

    @contextmanager
    def _lock_devices(self, allocation_name: str) -> Iterator[None]:
        """Hold the lock of these devices, so that no other command reserves or releases them.

        Raises _DevicesBusy.
        """
        lock = self._allocation_locks[allocation_name]
        if not lock.acquire(timeout=DEVICES_LOCK_S):
            raise _DevicesBusy(allocation_name)
        try:
            yield
        finally:
            lock.release()

    def _restart_node(self, restart: c.RestartNode) -> None:
        """Restart a node after reading again what Ray reserves there: the launch's information may be a minute old."""
        check = partial(ray_capacity.has_stuck_resources, restart.ray_id)
        RAY.submit(
            f"list the reservations on {restart.node}",
            check,
            DEVICES_LOCK_S,
            partial(self._restart_if_stuck, restart),
        )

    def _restart_if_stuck(self, restart: c.RestartNode, is_stuck: Any) -> None:
        node = self._agents.get(restart.node)
        is_same = node is not None and node.ray_id == restart.ray_id
        if is_stuck is not True or self._repair is None or not is_same:
            self._post(NodeNotRestarted(restart.node, restart.ray_id))
        elif not self._repair.restart(restart.node, restart.reason):
            log.warning("node %s is not restarted now: it was started too often lately", restart.node)
            self._post(NodeNotRestarted(restart.node, restart.ray_id))

    def _stop(self, stop: c.Stop) -> None:
        def post_result(error: BaseException | None) -> None:
            text = str(error) if error else ""
            self._post(
                StopAnswered(stop.node, stop.job, stop.epoch, stop.how, text, stop.requested_s, replies_to=stop.number)
            )

        self._agents.call_async(stop.node, "stop", stop.job, stop.epoch, stop.how, done=post_result)

    def _fence(self, fence: c.Fence) -> None:
        change = fences.lower_to if fence.lower else fences.raise_to
        change(fence.job, fence.epoch, partial(self._post_fence_result, fence))

    def _post_fence_result(self, fence: c.Fence, current_epoch: Any) -> None:
        is_error = isinstance(current_epoch, BaseException)
        epoch, error = (0, str(current_epoch)) if is_error else (current_epoch, "")
        self._post(FenceAnswered(fence.job, fence.epoch, epoch, error, fence.requested_s, replies_to=fence.number))

    def _request_nodes(self, command: c.RequestNodes) -> None:
        RAY.submit(
            "request nodes from its autoscaler",
            partial(autoscaler.request_nodes, command.requests),
            REQUEST_NODES_S,
            self._post_nodes_requested,
        )

    def _post_nodes_requested(self, result: Any) -> None:
        is_error = isinstance(result, BaseException)
        self._post(NodeRequestAnswered(first_line(result)) if is_error else NodeRequestAnswered(failed=result))


def _log_error(command: Command, error: BaseException | None) -> None:
    if error is not None:
        log.info("%s: %s", command, error)
