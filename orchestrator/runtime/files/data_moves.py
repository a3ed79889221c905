"""Fetch a job's input data into the caches of its nodes before the job starts.

If two launches need the same data in the same storage, one fetches it and the other waits. Fetched data is used only
after all of it was hashed at its target (workers/storage/data_cache.py).
"""

import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.errors import Conflict, FleetError, NotFound, SpecError, UserError
from orchestrator.core.controller.commands import Launch
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.runtime.files.data_sources import Item, SetActivity, Sources
from orchestrator.runtime.files.data_store import DataStore
from orchestrator.runtime.files.file_moves import COMMIT_S
from orchestrator.spec.checkpoint_address import is_local_path
from orchestrator.units import size
from workers.protocol.messages import Mount

NODES_AT_ONCE = 8


@dataclass(frozen=True)
class DataMoves:
    agents: Agents
    checkpoints: CheckpointService
    store: DataStore
    locks: dict[tuple[str, str], threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))

    def ensure_on_nodes(self, launch: Launch, set_activity: SetActivity) -> tuple[Mount, ...]:
        """Bring all data of a launch. Raises SpecError for the user's errors, FleetError for what is retried."""
        mounts = []
        for index, data in enumerate(launch.data):
            item = Item(f"data.{index}", data, data.sha256)
            first, *others = self._targets(launch)
            item = Item(item.field, data, self._ensure_on(first, item, set_activity))  # the same on all of its nodes
            with ThreadPoolExecutor(NODES_AT_ONCE, "data") as pool:
                list(pool.map(lambda node, item=item: self._ensure_on(node, item, set_activity), others))
            mounts.append(item.mount)
        return tuple(mounts)

    def _targets(self, launch: Launch) -> list[str]:
        """One node for each storage that the attempt's nodes use."""
        return list({self._storage_of(node): node for node in reversed(launch.nodes)}.values())

    def _storage_of(self, name: str) -> str:
        facts = self.agents.facts_of(name)
        return (facts.storage_id if facts else "") or f"node {name}"

    def _ensure_on(self, node: str, item: Item, set_activity: SetActivity) -> str:
        """Make sure that the node's cache has the item, and return its SHA-256."""
        set_activity(f"looks for {item.data.uri} on {node}")
        if item.expected and self.agents.call(node, "find_data", item.expected, timeout_s=COMMIT_S) is not None:
            return item.expected
        with self._lock_item(node, item, set_activity):
            if item.expected and self.agents.call(node, "find_data", item.expected, timeout_s=COMMIT_S) is not None:
                return item.expected
            try:
                return self._fetch(node, item, set_activity)
            except (Conflict, SpecError):
                raise
            except NotFound as e:
                raise SpecError(f"{item.field}.uri", e.message, e.remedy) from None
            except UserError as e:
                raise SpecError(item.field, e.message, e.remedy) from None

    @contextmanager
    def _lock_item(self, node: str, item: Item, set_activity: SetActivity) -> Iterator[None]:
        """Hold the lock of this item in this storage, so that no other launch fetches it at the same time."""
        lock = self.locks[self._storage_of(node), item.expected or item.data.uri]
        if not lock.acquire(blocking=False):
            set_activity(f"waits for {item.data.uri}, which another job fetches")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _fetch(self, node: str, item: Item, set_activity: SetActivity) -> str:
        source = Sources(self.agents, self.checkpoints, self.store).find(node, item, set_activity)
        cached = self.agents.call(node, "cached_data_sha256", source.key, timeout_s=COMMIT_S) if source.key else ""
        if cached and item.expected in ("", cached):
            return str(cached)
        self.agents.call(node, "free_data_space", source.bytes, timeout_s=COMMIT_S)
        upload = hashlib.sha256(f"{item.data.uri}\n{source.key}\n{item.expected}".encode()).hexdigest()[:24]
        inner = source.send(node, upload)
        set_activity(f"checks {size(source.bytes)} of data on {node}")
        record = self.agents.call(node, "keep_data", upload, inner, item.expected, source.key, timeout_s=COMMIT_S)
        actual = str(record["sha256"])
        if actual != item.expected and is_local_path(item.data.uri):
            raise FleetError(
                f"{item.data.uri} reached {node} with another content than on this server",
                "nothing to do: the server sends it again",
            )
        if item.expected not in ("", actual):
            message = f"is {item.expected}, and {item.data.uri} has the SHA-256 {actual}"
            raise SpecError(f"{item.field}.sha256", message, "correct the hash, or put the right data there")
        return actual
