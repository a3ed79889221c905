"""Carrying out one placement: reserve, bring checkpoint and folder to the nodes, give the orders. Runs in its own
thread.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import places
from cluster.errors import FleetError, NotFound, SpecError
from cluster.places import Place
from cluster.untrusted import Unreadable, read_bytes
from orchestrator.checkpoints import Checkpoints
from orchestrator.core.fold import Record
from orchestrator.core.model import Devices
from orchestrator.runtime import fences, reservations
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.live import Live
from orchestrator.runtime.orders import Share, orders
from orchestrator.runtime.packages import Packages
from orchestrator.spec import JobSpec

LONGEST_SECRET_BYTES = 64 << 10
MOST_SECRET_BYTES = 1 << 20
"""Of all secrets of a job: they become variables of a process, which the system limits."""


@dataclass(frozen=True)
class Launcher:
    """What a placement needs to be carried out. `launch` may raise FleetError or UserError; nothing then runs unasked:
    the caller stops whatever had started."""

    agents: Agents
    packages: Packages
    checkpoints: Checkpoints

    def launch(self, record: Record, spec: JobSpec, live: Live, devices: dict[str, Devices]) -> dict[str, Any] | None:
        """Start every part. Returns the checkpoint resumed from (pool, path, step), or None."""
        self._reserve(live, devices)
        fences.raise_to(live.job, live.epoch)
        resumed = self._bring_checkpoint(record, spec, devices[live.parts[0].devices_id])
        secrets = resolve_secrets(spec.secrets)
        for node in {part.node for part in live.parts}:
            if record.package:
                self.packages.send(record.package, node, self.agents)
        address, port = self.agents.call(live.parts[0].node, "meeting_place")
        given = orders(record, spec, self._shares(live, devices), (address, port), resumed)
        for order, part in zip(given, live.parts, strict=True):
            self.agents.call(part.node, "start", order.to_plain(), secrets)
        return resumed

    def _reserve(self, live: Live, devices: dict[str, Devices]) -> None:
        bundles, nodes = [], []
        for part in live.parts:
            have, agent = devices[part.devices_id], self.agents[part.node]
            cpus = float(agent.facts.cpu_count) if agent.facts else 1.0
            bundles.append(reservations.bundle(have.backend, have.emulated, len(part.numbers), have.total, cpus))
            nodes.append(agent.ray_node_id)
        reservations.reserve(live.key, bundles, nodes)

    def _bring_checkpoint(self, record: Record, spec: JobSpec, have: Devices) -> dict[str, Any] | None:
        """The job's newest checkpoint, else the one it was told to start from, made readable in the pool of `have`."""
        source = self._newest(record)
        if source is None and spec.checkpoint.resume_from:
            source = self._asked_for(spec.checkpoint.resume_from, have.pool)
        if source is None or source["pool"] == have.pool:
            return source
        final = f"{record.job.id}/{Path(source['path']).name}"
        reader = self._readers(source["pool"])[0]
        self.checkpoints.move((reader, Place(source["pool"], source["path"])), have.node, final)
        return source | {"pool": have.pool, "path": final}

    def _newest(self, record: Record) -> dict[str, Any] | None:
        """Of all pools the job has been to: an attempt cut off from us may have saved after it last reported.

        Raises FleetError when a newer one is known where no node can look: progress is not thrown away.
        """
        pools = {attempt.pool: self._readers(attempt.pool) for attempt in record.attempts[:-1]}
        found = [
            self.checkpoints.newest(nodes[0], Place(pool, record.job.id)) for pool, nodes in pools.items() if nodes
        ]
        newest = max((f for f in found if f), key=lambda f: int(f["step"]), default=None)
        known = record.checkpoint
        unseen = known is not None and not pools.get(known["pool"])
        if known and unseen and (newest is None or newest["step"] < known["step"]):
            raise FleetError(
                f"the newest checkpoint (step {known['step']}) lies in pool {known['pool']}, of which no node is up",
                "`polyfleet up` restarts lost nodes; the job goes on from it then",
            )
        return newest

    def _readers(self, pool: str) -> list[str]:
        """Nodes that see the checkpoints of `pool`: its own first, then others of the same machine."""
        own = [name for name, _ in self.agents.of_pool(pool)]
        return own + [name for name, agent in self.agents.ready() if agent.facts and pool in agent.facts.neighbours]

    def _asked_for(self, text: str, pool: str) -> dict[str, Any]:
        reference = places.in_pool(text, "checkpoint.resume_from", pool)
        try:
            shown = self.checkpoints.show(str(reference))
        except NotFound as e:
            raise SpecError("checkpoint.resume_from", e.message, e.remedy) from None
        return {"pool": reference.pool, "path": shown["path"], "step": shown["step"]}

    def _shares(self, live: Live, devices: dict[str, Devices]) -> list[Share]:
        return [Share(part, devices[part.devices_id], self._storage(part.node)) for part in live.parts]

    def _storage(self, node: str) -> str:
        facts = self.agents[node].facts
        if facts is None:
            raise FleetError(f"node {node} has not reported yet", "the job is tried again")
        return facts.storage


def resolve_secrets(references: dict[str, str]) -> dict[str, str]:
    """NAME -> value from `env:NAME` (the server's environment) or `file:/path`. Raises SpecError naming the one that is
    absent, empty, too long or no text.
    """
    values = {name: _secret(f"secrets.{name}", reference) for name, reference in references.items()}
    if sum(len(value.encode()) for value in values.values()) > MOST_SECRET_BYTES:
        raise SpecError("secrets", f"are longer than {MOST_SECRET_BYTES} bytes together", "send large data as files")
    return values


def _secret(field: str, reference: str) -> str:
    scheme, _, where = reference.partition(":")
    value = _of_environment(field, where) if scheme == "env" else _of_file(field, where)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise SpecError(field, f"{where} cannot be read: it is not UTF-8 text", "encode it, as base64 say") from None
    if not value or "\0" in value:
        what = "holds a NUL byte, which no variable can" if value else "is empty"
        raise SpecError(field, f"{where} {what}", "write the secret there as text")
    if size > LONGEST_SECRET_BYTES:
        raise SpecError(field, f"{where} is longer than {LONGEST_SECRET_BYTES} bytes", "send large data as files")
    return value


def _of_environment(field: str, name: str) -> str:
    if name not in os.environ:
        remedy = "`polyfleet server stop`, set it, then the same again: the next server has it"
        raise SpecError(field, f"{name} is not set in the server's environment", remedy)
    return os.environ[name]


def _of_file(field: str, where: str) -> str:
    """Links are followed: secrets that Kubernetes mounts are links."""
    try:
        return read_bytes(Path(where).resolve(), LONGEST_SECRET_BYTES).decode().strip()
    except (OSError, RuntimeError, ValueError, Unreadable) as e:
        said = e.why.removeprefix("cannot be opened: ") if isinstance(e, Unreadable) else _said(e)
        raise SpecError(field, f"{where} cannot be read: {said}", "check the path and its mode") from None


def _said(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return (error.strerror if isinstance(error, OSError) else None) or "it is no path of a file"
