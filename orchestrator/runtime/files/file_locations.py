"""Locate a job's files: the folder of its newest attempt, on a node or in the object store of its pool."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.errors import FleetError
from orchestrator.core.controller.attempts import PreviousAttempt
from orchestrator.core.timing import NODE_SILENT_S
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.clock import now
from orchestrator.runtime.files.stored_file_downloads import ProgressCallback, StoredFileDownloads


@dataclass(frozen=True, slots=True)
class Folder:
    """A job's output folder, read through `node`.

    `storage` identifies the storage of `pool` that has it; nodes may share one. `node_rank`: rank of the attempt's part
    that wrote there. `missing`: a sentence on files that were lost, because the folder comes from an object store.
    """

    epoch: int
    node: str
    pool: str
    storage: str
    node_rank: int = 0
    missing: str = ""

    def path(self, job: str) -> str:
        return f"{job}/output-{self.epoch}"


@dataclass(frozen=True, slots=True)
class LocatedFiles:
    """The folders of the newest attempt: several if its nodes do not share storage.

    `away`: nodes that may have a folder but cannot be reached. `empty`: nodes that can be reached and have none.
    """

    folders: tuple[Folder, ...] = ()
    away: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()


class FileLocator:
    def __init__(self, agents: Agents):
        self._agents, self._downloads = agents, StoredFileDownloads(agents)

    def find_or_download(
        self, job: str, attempts: Sequence[PreviousAttempt], on_progress: ProgressCallback
    ) -> LocatedFiles:
        """Find the job's newest folders; those that only an object store has are first downloaded to a node.

        `on_progress` is called during the download; see StoredFileDownloads. Raises FleetError if a store does not
        respond.
        """
        located = self.find(job, attempts)
        newest = max((folder.epoch for folder in located.folders), default=_floor(attempts))
        missing = {
            node: attempt.pool
            for attempt in attempts
            if attempt.started and attempt.epoch >= newest
            for node in attempt.nodes
            if node in located.away + located.empty
        }
        arrived = [self._downloads.download(job, pool, node, newest, on_progress) for node, pool in missing.items()]
        return self.find(job, attempts) if any(arrived) else located

    def find(self, job: str, attempts: Sequence[PreviousAttempt]) -> LocatedFiles:
        """Find the job's newest folders. `attempts`: newest first.

        Folders older than the newest started attempt are ignored: that attempt started with their files, and anything
        that appears there later is from a process that was replaced.
        """
        floor = _floor(attempts)
        folders: dict[str, Folder] = {}
        away: list[str] = []
        empty: list[str] = []
        for attempt in (attempt for attempt in attempts if attempt.epoch >= floor):
            for rank, node in enumerate(attempt.nodes):
                candidate = self._newest_folder(job, attempt.pool, node, rank, floor)
                if candidate is None:
                    away.append(node)
                elif candidate.epoch >= floor and candidate.epoch:
                    folders.setdefault(candidate.storage, candidate)
                else:
                    empty.append(node)
        newest = max((folder.epoch for folder in folders.values()), default=0)
        newest_folders = (folder for folder in folders.values() if folder.epoch == newest)
        by_rank = tuple(sorted(newest_folders, key=lambda f: f.node_rank))
        return LocatedFiles(by_rank, tuple(dict.fromkeys(away)), tuple(dict.fromkeys(empty)))

    def _newest_folder(self, job: str, pool: str, node: str, rank: int, floor: int) -> Folder | None:
        """The job's newest folder in the storage of `node`, of epoch 0 if there is none.

        None if no node can read that storage.
        """
        for reader in self._readers(node, pool):
            reply = self._agents.call(reader, "files_of", job, pool)
            is_others = reply["origin"] not in ("", node)  # it was downloaded, and another node had written it
            epoch = 0 if is_others else int(reply["epoch"])
            folder = Folder(epoch, reader, pool, str(reply["storage"]), rank, str(reply["missing"]))
            if folder.epoch >= max(floor, 1) or reader == node or self._share_storage(reader, node, pool):
                return folder
        return None

    def _readers(self, node: str, pool: str) -> Iterator[str]:
        """Nodes to call: the node itself, or else others that may see its storage.

        A silent node is not called, because the next attempt would have to wait for it.
        """
        ready = {name: other for name, other in self._agents.ready() if other.silent_s(now().s) <= NODE_SILENT_S}
        if node in ready:
            yield node
            return
        yield from (name for name, other in ready.items() if other.facts and other.facts.pool == pool)
        yield from (name for name, other in ready.items() if other.facts and pool in other.facts.neighbours)

    def _share_storage(self, reader: str, node: str, pool: str) -> bool:
        """Check that both nodes certainly use the same storage: they are on one machine."""
        reader_facts, node_facts = self._agents.facts_of(reader), self._agents.facts_of(node)
        if reader_facts is None or node_facts is None or reader_facts.host != node_facts.host:
            return False
        return (
            reader_facts.storage == node_facts.storage if reader_facts.pool == pool else pool in reader_facts.neighbours
        )

    def away_error(self, job: str, nodes: Sequence[str]) -> FleetError:
        """Make the error for files that no reachable node has."""
        reasons = "; ".join(f"node {name}, {self._agents.away_reason(name)}" for name in nodes)
        remedy = "run `polyfleet up` to restart lost nodes; the files stay on the node"
        if not (self._agents.problem or any(map(self._agents.get, nodes))):
            remedy = (
                "if the node was released, only files in its pool's object store are left, which a node of that pool"
                " downloads once it is up; without one they are lost"
            )
        return FleetError(f"the files of {job} are on {reasons}", remedy)


def _floor(attempts: Sequence[PreviousAttempt]) -> int:
    """The epoch of the newest attempt that has started."""
    return max((attempt.epoch for attempt in attempts if attempt.started), default=0)
