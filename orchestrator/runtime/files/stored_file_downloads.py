"""Files of a job that only the object store of a pool has: a node of the pool downloads them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cluster.errors import Conflict, FleetError
from orchestrator.core.timing import NODE_SILENT_S
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.clock import now

WAIT_S = 2.0
CALL_S = 60.0
ProgressCallback = Callable[[str, int, int], None]
"""Gets the node that downloads, and how many bytes of how many; it is called every WAIT_S. An error ends the wait."""


class StoredFileDownloads:
    def __init__(self, agents: Agents):
        self._agents = agents

    def download(self, job: str, pool: str, node: str, floor: int, on_progress: ProgressCallback) -> bool:
        """Have a node of `pool` download what `node` uploaded of a job's attempts from `floor` on.

        Return whether it has them now. Raises FleetError if the store cannot be reached, and what `on_progress` raises;
        the download continues in that case.
        """
        for name in self._nodes(pool, node):
            if int(self._agents.call(name, "files_of", job, "")["epoch"]) >= floor and name != node:
                continue  # it has the files of another node of the job
            with suppress(Conflict):
                return self._wait(name, job, node, floor, on_progress)
        return False

    def _nodes(self, pool: str, node: str) -> Iterator[str]:
        """Nodes of the pool that respond and use an object store: first the node itself."""
        nodes = [
            (name, other) for name, other in self._agents.of_pool(pool) if other.facts and other.facts.object_store
        ]
        responding = [name for name, other in nodes if other.silent_s(now().s) <= NODE_SILENT_S]
        yield from sorted(responding, key=lambda name: name != node)

    def _wait(self, name: str, job: str, node: str, floor: int, on_progress: ProgressCallback) -> bool:
        while True:
            with _errors_with_node(name, job):
                reply = self._agents.call(name, "restore_files", job, node, floor, WAIT_S, timeout_s=CALL_S)
            if reply["epoch"] is not None:
                return bool(reply["epoch"])
            on_progress(name, *reply["progress"])


@contextmanager
def _errors_with_node(node: str, job: str) -> Iterator[None]:
    """Add the node and the job to the message of an error, such as that of a full disk."""
    try:
        yield
    except FleetError as e:
        raise FleetError(f"node {node} cannot download the files of {job}: {e.message}", e.remedy) from e
