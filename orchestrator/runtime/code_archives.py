"""Submitted folders on their way: kept by the server by SHA-256, sent to a node once, in bounded pieces, and removed
where no job names them any more.
"""

import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster import archive_unpack
from cluster.errors import NotFound, PolyfleetError
from cluster.last_used import LastUsed
from cluster.paths import write_durably, write_private
from orchestrator.runtime.agents import Agents

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20


class Packages:
    def __init__(self, folder: Path):
        self._folder, self._uses = folder, LastUsed()
        self._sending: dict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".incoming-*"):  # of a server that was killed; one serves this home at a time
            left.unlink(missing_ok=True)

    def path(self, sha: str) -> Path:
        """Where that archive lies. Raises NotFound for a name that is no digest or was never uploaded."""
        found = self._folder / f"{sha}.zip"
        if len(sha) != 64 or set(sha) - set("0123456789abcdef") or not found.is_file():
            raise NotFound(f"no uploaded folder {sha[:12] or '(empty)'}", "submit the job again")
        return found

    def contents(self, sha: str) -> archive_unpack.Contents:
        """Names and `content_sha` of an uploaded archive; empty for "", a job without a folder. Raises NotFound."""
        if not sha:
            return archive_unpack.Contents([], "")
        self._uses.note(sha)
        archive = self.path(sha)
        if (listed := self._listed(sha)) is None:  # kept by an older version
            self._list(sha, archive)
            listed = self._listed(sha) or {}
        return archive_unpack.Contents(**listed["contents"])

    def has(self, sha: str) -> bool:
        """Whether it lies there whole, as far as its size tells. Asking counts as use: a submission follows."""
        self._uses.note(sha)
        listed, archive = self._listed(sha), self._folder / f"{sha}.zip"
        return listed is not None and archive.is_file() and archive.stat().st_size == listed["bytes"]

    def keep(self, sha: str, data: Path) -> None:
        """Take over `data`, whose digest the caller has checked. Raises UserError for what no node could unpack: there
        it would look like a node's failure, and be tried again. It is on disk when this returns, and replaces one of
        that name, which may have been damaged.
        """
        self._uses.note(sha)
        self._list(sha, data)
        write_durably(data)
        data.replace(self._folder / f"{sha}.zip")
        write_durably(self._folder)

    def _list(self, sha: str, archive: Path) -> None:
        """Whole or not at all: a killed server leaves no half of it."""
        told = {"bytes": archive.stat().st_size, "contents": asdict(archive_unpack.read_in_child(archive))}
        write_private(self._names(sha), json.dumps(told))

    def _listed(self, sha: str) -> dict[str, Any] | None:
        """The stored "bytes" and "contents" of an archive; None where they are missing or from an older version."""
        try:
            found = json.loads(self._names(sha).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) and "contents" in found else None

    def _names(self, sha: str) -> Path:
        return self._folder / f"{sha}.names"

    def idle(self) -> list[str]:
        """Those that nobody used for an hour."""
        return self._uses.idle(path.stem for path in self._folder.glob("*.zip"))

    def remove(self, names: Iterable[str]) -> None:
        """Those of them that are still idle."""
        for sha in names:
            with self._uses.removing(sha) as idle:
                if idle:
                    (self._folder / f"{sha}.zip").unlink(missing_ok=True)
                    self._names(sha).unlink(missing_ok=True)

    def send(self, sha: str, node: str, agents: Agents) -> None:
        """Make sure `node` has it. The node checks the digest before it uses it. Two launches take turns: it takes the
        pieces of one upload in their order.
        """
        with self._sending[sha, node]:
            if not agents.call(node, "has_package", sha):
                self._send(sha, node, agents)

    def _send(self, sha: str, node: str, agents: Agents) -> None:
        size = self.path(sha).stat().st_size
        with self.path(sha).open("rb") as f:
            while piece := f.read(PIECE_BYTES):
                agents.call(node, "put_package", sha, f.tell() - len(piece), piece, f.tell() == size, timeout_s=60)


class Unnamed:
    """Removes packages that nothing names any more, here and on nodes. `job_naming` finds a job that names one, ""
    if there is none; `exists` tells whether a job is in the store; `in_use` are named by what is no job.

    A job that names a package is remembered: the next look asks only whether it is there still.
    """

    def __init__(
        self,
        packages: Packages,
        agents: Agents,
        job_naming: Callable[[str], str],
        exists: Callable[[str], bool],
        in_use: Callable[[], set[str]],
    ):
        self._packages, self._agents = packages, agents
        self._job_naming, self._exists, self._in_use = job_naming, exists, in_use
        self._job: dict[str, str] = {}

    def remove(self) -> None:
        """What is used meanwhile is no longer idle, and stays. Raises FleetError where the store cannot be read."""
        here, on_nodes = self._packages.idle(), dict(self._idle_on_nodes())
        in_use = self._in_use()
        found = dict.fromkeys([*here, *(sha for names in on_nodes.values() for sha in names)])
        gone = {sha for sha in found if sha not in in_use and not self._is_named(sha)}
        self._packages.remove(gone.intersection(here))
        for node, names in on_nodes.items():
            if left := sorted(gone.intersection(names)):
                self._asked(node, "remove_packages", left)

    def _idle_on_nodes(self) -> Iterable[tuple[str, list[str]]]:
        for node, _ in self._agents.ready():
            yield node, self._asked(node, "idle_packages") or []

    def _asked(self, node: str, method: str, *arguments: Any) -> Any:
        """None where it does not answer: it is asked again with the next look."""
        try:
            return self._agents.call(node, method, *arguments)
        except PolyfleetError as e:
            log.info("node %s keeps its packages for now: %s", node, e)
            return None

    def _is_named(self, sha: str) -> bool:
        known = self._job.pop(sha, "")
        if not known or not self._exists(known):
            known = self._job_naming(sha)
        if known:
            self._job[sha] = known
        return bool(known)
