"""Where the files of a job lie: in the folder of its newest attempt, on the node that it ran on, or on a node that sees
the same storage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.errors import FleetError
from cluster.types import NodeFacts
from orchestrator.core.attempts import Ran
from orchestrator.core.timing import NODE_SILENT_S
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.step_batch import now


@dataclass(frozen=True, slots=True)
class Folder:
    """What `node` reads in the storage of `pool`. `storage` names that storage: nodes may share one. `node_rank` is of
    the attempt's part that wrote there.
    """

    epoch: int
    node: str
    pool: str
    storage: str
    node_rank: int = 0

    def path(self, job: str) -> str:
        return f"{job}/output-{self.epoch}"


@dataclass(frozen=True, slots=True)
class Found:
    """One folder, or several of the newest attempt where its nodes share no storage. `away`: nodes that may have one
    and cannot be asked.
    """

    folders: tuple[Folder, ...] = ()
    away: tuple[str, ...] = ()


class FilePlaces:
    def __init__(self, agents: Agents):
        self._agents = agents

    def find(self, job: str, ran: Sequence[Ran]) -> Found:
        """`ran` are its attempts, the newest first. Folders older than the newest attempt that started count no more:
        it began with what there was, and what appears there later is of a process that was replaced.
        """
        floor = max((one.epoch for one in ran if one.started), default=0)
        folders: dict[str, Folder] = {}
        away: list[str] = []
        for one in (one for one in ran if one.epoch >= floor):
            for rank, node in enumerate(one.nodes):
                seen = self._seen(job, one.pool, node, rank, floor)
                if seen is None:
                    away.append(node)
                elif seen.epoch >= floor and seen.epoch:
                    folders.setdefault(seen.storage, seen)
        newest = max((folder.epoch for folder in folders.values()), default=0)
        counting = (folder for folder in folders.values() if folder.epoch == newest)
        return Found(tuple(sorted(counting, key=lambda f: f.node_rank)), tuple(dict.fromkeys(away)))

    def _seen(self, job: str, pool: str, node: str, rank: int, floor: int) -> Folder | None:
        """The newest folder of the job where that node's storage is seen; of epoch 0 where there is none. None where
        nobody can tell.
        """
        for reader in self._readers(node, pool):
            told = self._agents.call(reader, "files_of", job, pool)
            folder = Folder(int(told["epoch"]), reader, pool, str(told["storage"]), rank)
            if folder.epoch >= max(floor, 1) or reader == node or self._share(reader, node, pool):
                return folder
        return None

    def _readers(self, node: str, pool: str) -> Iterator[str]:
        """The node itself first, then others that may see its storage. One that has been silent is asked for nothing:
        whoever takes over from it would wait for it.
        """
        ready = {name: other for name, other in self._agents.ready() if other.silent_s(now().s) <= NODE_SILENT_S}
        if node in ready:
            yield node
            return
        yield from (name for name, other in ready.items() if other.facts and other.facts.pool == pool)
        yield from (name for name, other in ready.items() if other.facts and pool in other.facts.neighbours)

    def _share(self, reader: str, node: str, pool: str) -> bool:
        """Whether both certainly see one storage: they are of one machine."""
        one, other = self._facts(reader), self._facts(node)
        if one is None or other is None or one.host != other.host:
            return False
        return one.storage == other.storage if one.pool == pool else pool in one.neighbours

    def _facts(self, name: str) -> NodeFacts | None:
        node = self._agents.get(name)
        return node.facts if node else None

    def is_away(self, job: str, nodes: Sequence[str]) -> FleetError:
        """What to tell whoever asks for files that nobody reaches."""
        told = "; ".join(f"node {name}, {self._agents.away_reason(name)}" for name in nodes)
        remedy = "bring that node back: `polyfleet up` starts lost ones; its files stay"
        if not (self._agents.trouble or any(map(self._agents.get, nodes))):
            remedy = "where it was given back, they are gone with it: give its pool a shared storage"
        return FleetError(f"the files of {job} lie on {told}", remedy)
