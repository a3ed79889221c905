"""Submitted folders on their way: kept by the server by SHA-256, sent to a node once, in bounded pieces."""

import json
from pathlib import Path

from cluster import unpacking
from cluster.errors import NotFound
from cluster.paths import write_private
from orchestrator.runtime.agents import Agents

PIECE_BYTES = 4 << 20


class Packages:
    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".incoming-*"):  # of a server that was killed; one serves this home at a time
            left.unlink(missing_ok=True)

    def path(self, sha: str) -> Path:
        """Where that archive lies. Raises NotFound for a name that is no digest or was never uploaded."""
        found = self._folder / f"{sha}.zip"
        if len(sha) != 64 or set(sha) - set("0123456789abcdef") or not found.is_file():
            raise NotFound(f"no uploaded folder {sha[:12] or '(empty)'}", "submit the job again")
        return found

    def names(self, sha: str) -> list[str]:
        """Of all files in it. Raises NotFound."""
        archive = self.path(sha)
        if not self._listed(sha).is_file():  # kept by an older version
            self._list(sha, archive)
        names: list[str] = json.loads(self._listed(sha).read_text())
        return names

    def has(self, sha: str) -> bool:
        return (self._folder / f"{sha}.zip").is_file()

    def keep(self, sha: str, data: Path) -> None:
        """Take over `data`, whose digest the caller has checked. Raises UserError for what no node could unpack: there
        it would look like a node's failure, and be tried again.
        """
        if not self.has(sha):
            self._list(sha, data)
            data.replace(self._folder / f"{sha}.zip")

    def _list(self, sha: str, archive: Path) -> None:
        """Whole or not at all: a killed server leaves no half of it."""
        write_private(self._listed(sha), json.dumps(unpacking.read_apart(archive)))

    def _listed(self, sha: str) -> Path:
        """Where the names of an archive's files lie."""
        return self._folder / f"{sha}.names"

    def send(self, sha: str, node: str, agents: Agents) -> None:
        """Make sure `node` has it. The node checks the digest before it uses it."""
        if agents.call(node, "has_package", sha):
            return
        size = self.path(sha).stat().st_size
        with self.path(sha).open("rb") as f:
            while piece := f.read(PIECE_BYTES):
                agents.call(node, "put_package", sha, f.tell() - len(piece), piece, f.tell() == size, timeout_s=60)
