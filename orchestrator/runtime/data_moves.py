"""Data that a job reads, brought into the caches of its nodes before it starts.

Of two launches that want the same in the same storage, one fetches it and the other waits. What arrives counts once all
of it was hashed where it lies (workers/data_cache.py).
"""

import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.errors import Conflict, FleetError, NotFound, SpecError, UserError
from orchestrator.checkpoint_address import of_this_machine
from orchestrator.checkpoints import CheckpointService
from orchestrator.core.commands import Launch
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.data_sources import Item, Sources, Tell, facts_of
from orchestrator.runtime.data_store import DataStore
from orchestrator.runtime.file_moves import COMMIT_S
from orchestrator.show.units import size
from workers.messages import Mount

NODES_AT_ONCE = 8


@dataclass(frozen=True)
class DataMoves:
    agents: Agents
    checkpoints: CheckpointService
    store: DataStore
    locks: dict[tuple[str, str], threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))

    def bring(self, asked: Launch, tell: Tell) -> tuple[Mount, ...]:
        """Raises SpecError for what its user has to put right, FleetError for what is tried again."""
        mounts = []
        for index, wanted in enumerate(asked.data):
            item = Item(f"data.{index}", wanted, wanted.sha256)
            first, *others = self._targets(asked)
            item = Item(item.field, wanted, self._on(first, item, tell))  # the same on all of its nodes
            with ThreadPoolExecutor(NODES_AT_ONCE, "data") as pool:
                list(pool.map(lambda node, item=item: self._on(node, item, tell), others))
            mounts.append(item.mount)
        return tuple(mounts)

    def _targets(self, asked: Launch) -> list[str]:
        """One node for each storage of the attempt's nodes."""
        return list({self._storage_of(node): node for node in reversed(asked.nodes)}.values())

    def _storage_of(self, name: str) -> str:
        facts = facts_of(self.agents, name)
        return (facts.storage_id if facts else "") or f"node {name}"

    def _on(self, node: str, item: Item, tell: Tell) -> str:
        """The SHA-256 of what that node has in its cache now."""
        tell(f"looks for {item.wanted.uri} on {node}")
        if item.expected and self.agents.call(node, "find_data", item.expected, timeout_s=COMMIT_S) is not None:
            return item.expected
        with self._alone(node, item, tell):
            if item.expected and self.agents.call(node, "find_data", item.expected, timeout_s=COMMIT_S) is not None:
                return item.expected
            try:
                return self._fetched(node, item, tell)
            except (Conflict, SpecError):
                raise
            except NotFound as e:
                raise SpecError(f"{item.field}.uri", e.message, e.remedy) from None
            except UserError as e:
                raise SpecError(item.field, e.message, e.remedy) from None

    @contextmanager
    def _alone(self, node: str, item: Item, tell: Tell) -> Iterator[None]:
        """Nobody else fetches the same into the same storage."""
        lock = self.locks[self._storage_of(node), item.expected or item.wanted.uri]
        if not lock.acquire(blocking=False):
            tell(f"waits for {item.wanted.uri}, which another job fetches")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _fetched(self, node: str, item: Item, tell: Tell) -> str:
        source = Sources(self.agents, self.checkpoints, self.store).of(node, item, tell)
        known = self.agents.call(node, "data_found_at", source.key, timeout_s=COMMIT_S) if source.key else ""
        if known and item.expected in ("", known):
            return str(known)
        self.agents.call(node, "make_data_room", source.bytes, timeout_s=COMMIT_S)
        upload = hashlib.sha256(f"{item.wanted.uri}\n{source.key}\n{item.expected}".encode()).hexdigest()[:24]
        inner = source.send(node, upload)
        tell(f"checks {size(source.bytes)} of data on {node}")
        kept = self.agents.call(node, "keep_data", upload, inner, item.expected, source.key, timeout_s=COMMIT_S)
        found = str(kept["sha256"])
        if found != item.expected and of_this_machine(item.wanted.uri):
            raise FleetError(f"{item.wanted.uri} did not reach {node} as it is on this server", "it is sent again")
        if item.expected not in ("", found):
            told = f"is {item.expected}, and {item.wanted.uri} has the SHA-256 {found}"
            raise SpecError(f"{item.field}.sha256", told, "correct the hash, or put the right data there")
        return found
