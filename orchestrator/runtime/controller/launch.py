"""Carry out one placement: reserve devices, copy data and code to the nodes, start the ranks.

Each launch runs in its own thread, and works on its nodes in parallel.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster.errors import Conflict, NotFound, PolyfleetError, UserError
from orchestrator.core.controller.commands import Launch
from orchestrator.core.controller.messages import Launched, LaunchFailed
from orchestrator.runtime.agents import fences, reservations
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.agents.ray_capacity import NoCapacity
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.runtime.checkpoints.resume_source import ResumeSourceFinder
from orchestrator.runtime.checkpoints.script_resume import ScriptResume, prepare_script_checkpoint
from orchestrator.runtime.controller.secrets import resolve_secrets
from orchestrator.runtime.files.code_archives import ServerCodeArchives
from orchestrator.runtime.files.data_moves import DataMoves
from orchestrator.runtime.files.file_moves import FileMoves
from workers.errors import EpochPast
from workers.protocol.messages import Order

MAX_CONCURRENT_NODES = 32
"""Maximum number of nodes that one launch calls in parallel."""


class PartlyStarted(Exception):
    """A node refused to start its ranks, or did not respond.

    `maybe_started`: nodes where ranks may have been started; `unanswered`: those of them that did not respond.
    """

    def __init__(self, cause: PolyfleetError, nodes: tuple[str, ...], failed: tuple[str, ...]):
        super().__init__(str(cause))
        self.cause, self.maybe_started, self.unanswered = cause, nodes, failed


@dataclass(frozen=True)
class Launcher:
    """Services that a launch uses. `activity`: what each launch does now, by attempt key."""

    agents: Agents
    code_archives: ServerCodeArchives
    checkpoints: CheckpointService
    data: DataMoves
    activity: dict[str, str] = field(default_factory=dict)

    @property
    def _resume_source(self) -> ResumeSourceFinder:
        return ResumeSourceFinder(self.agents, self.checkpoints)

    def launch(self, command: Launch) -> Launched | LaunchFailed:
        """Start every part of an attempt. Expected errors are returned as LaunchFailed."""
        try:
            return self._launch(command)
        finally:
            self.activity.pop(command.attempt, None)

    def _launch(self, command: Launch) -> Launched | LaunchFailed:
        try:
            self._set_activity(command, "waits for Ray to reserve its devices")
            self._reserve(command)
            self._set_activity(command, "waits for Ray to raise its fence")
            if newest_epoch := fences.acquire(command.job, command.epoch, command.fence_is_ours):
                message = (
                    f"attempt {newest_epoch} of it may have run before: the fence of the job is already at this attempt"
                )
                return LaunchFailed(command.job, command.epoch, "launch", message, newest_epoch=newest_epoch)
            resume_source = self._resume_source.ensure_on_nodes(command, partial(self._set_activity, command))
            missing_files = FileMoves(self.agents, self.checkpoints.rate_limit).ensure_on_nodes(
                command, partial(self._set_activity, command)
            )
            script = prepare_script_checkpoint(self.agents, command, partial(self._set_activity, command))
            mounts = self.data.ensure_on_nodes(command, partial(self._set_activity, command))
            ready = replace(command, orders=tuple(replace(order, data=mounts) for order in command.orders))
            self._start(ready, resume_source.checkpoint, script)
        except PartlyStarted as e:
            return replace(_failed(command, e.cause), maybe_started=e.maybe_started, unanswered=e.unanswered)
        except NoCapacity as e:
            return replace(_failed(command, e), lacking=e.lacking, stuck=e.stuck)
        except PolyfleetError as e:
            return _failed(command, e)
        step = resume_source.checkpoint["step"] if resume_source.checkpoint else None
        source = (
            f"{resume_source.checkpoint['pool']}:{resume_source.checkpoint['path']}" if resume_source.checkpoint else ""
        )
        return Launched(
            command.job,
            command.epoch,
            step,
            missed=resume_source.missed,
            missed_files=missing_files,
            script=script.text,
            source=source,
        )

    def _set_activity(self, command: Launch, activity: str) -> None:
        self.activity[command.attempt] = activity

    def _reserve(self, command: Launch) -> None:
        ids = [self.agents[node].ray_id for node in command.nodes]
        try:
            reservations.reserve(command.reservation_name, [dict(bundle) for bundle in command.bundles], ids)
        except NoCapacity as e:
            raise e.with_names(dict(zip(ids, command.nodes, strict=True))) from e

    def _start(self, command: Launch, resumed: dict[str, Any] | None, script: ScriptResume) -> None:
        """Send the code to all nodes, then start the ranks. Raises PartlyStarted, PolyfleetError."""
        secrets = resolve_secrets(command.secrets)
        if command.code_archive:
            self._set_activity(command, "sends its code to its nodes")
            send = partial(
                self.code_archives.send,
                command.code_archive,
                agents=self.agents,
                rate_limit=self.checkpoints.rate_limit,
            )
            _raise_first(self._on_each(dict.fromkeys(command.nodes), send))
        self._set_activity(command, f"waits for {', '.join(command.nodes)} to start its ranks")
        is_alone = len(command.nodes) == 1  # a single agent chooses the rendezvous address itself
        address, port = ("", 0) if is_alone else self.agents.call(command.nodes[0], "rendezvous_address")
        orders = {
            node: replace(order, master_address=address, master_port=port, resume_from=_resume_path(order, resumed))
            for node, order in zip(command.nodes, map(script.add_to, command.orders), strict=True)
        }
        failed = self._on_each(orders, lambda node: self._start_on(node, orders[node], secrets))
        if failed:
            refused = {node for node, e in failed.items() if isinstance(e, UserError | Conflict)}
            causes = [failed[node] for node in command.nodes if node in failed]
            first = next((e for e in causes if isinstance(e, EpochPast)), causes[0])
            maybe_started = tuple(node for node in command.nodes if node not in refused)
            raise PartlyStarted(first, maybe_started, tuple(node for node in maybe_started if node in failed))

    def _start_on(self, node: str, order: Order, secrets: Mapping[str, str]) -> None:
        self.agents.call(node, "start", self.agents.generation, order.to_plain(), dict(secrets))

    def _on_each(self, nodes: Iterable[str], do: Callable[[str], None]) -> dict[str, PolyfleetError]:
        """Call `do` for all nodes in parallel; return the errors by node."""
        names = list(nodes)
        if len(names) == 1:
            return {name: e for name in names if (e := _error(do, name)) is not None}
        with ThreadPoolExecutor(min(len(names), MAX_CONCURRENT_NODES)) as pool:
            errors = pool.map(lambda name: _error(do, name), names)
        return {name: e for name, e in zip(names, errors, strict=True) if e is not None}


def _resume_path(order: Order, resumed: dict[str, Any] | None) -> str:
    """Path of the checkpoint as the node sees it: in the pool's storage, beside the job's own folder."""
    return str(Path(order.checkpoint_root).parent / resumed["path"]) if resumed else ""


def _failed(command: Launch, error: PolyfleetError) -> LaunchFailed:
    """Classify a launch error: a user's error ends the job, an error of the fleet is retried."""
    is_user_error = isinstance(error, UserError) and not isinstance(error, NotFound | Conflict)
    newest_epoch = error.newest if isinstance(error, EpochPast) else 0
    return LaunchFailed(
        command.job, command.epoch, "user" if is_user_error else "launch", str(error), newest_epoch=newest_epoch
    )


def _error(do: Callable[[str], None], node: str) -> PolyfleetError | None:
    try:
        do(node)
    except PolyfleetError as e:
        return e
    return None


def _raise_first(failed: Mapping[str, PolyfleetError]) -> None:
    for error in failed.values():
        raise error
