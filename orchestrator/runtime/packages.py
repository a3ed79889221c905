"""Submitted folders on their way: kept by the server by SHA-256, sent to a node once, in bounded pieces."""

import json
from pathlib import Path

from cluster import unpacking
from cluster.errors import NotFound
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
        listed = self._listed(self.path(sha))
        if not listed.is_file():  # of a server before this one
            listed.write_text(json.dumps(unpacking.read_apart(self.path(sha))))
        names: list[str] = json.loads(listed.read_text())
        return names

    def has(self, sha: str) -> bool:
        return (self._folder / f"{sha}.zip").is_file()

    def keep(self, sha: str, data: Path) -> None:
        """Take over `data`, whose digest the caller has checked. Raises UserError for what no node could unpack: there
        it would look like a node's failure, and be tried again.
        """
        if not self.has(sha):
            self._listed(data).write_text(json.dumps(unpacking.read_apart(data)))
            self._listed(data).replace(self._listed(self._folder / sha))
            data.replace(self._folder / f"{sha}.zip")

    def _listed(self, archive: Path) -> Path:
        """Beside it: the names of its files."""
        return archive.with_suffix(".names")

    def send(self, sha: str, node: str, agents: Agents) -> None:
        """Make sure `node` has it. The node checks the digest before it uses it."""
        if agents.call(node, "has_package", sha):
            return
        size = self.path(sha).stat().st_size
        with self.path(sha).open("rb") as f:
            while piece := f.read(PIECE_BYTES):
                agents.call(node, "put_package", sha, f.tell() - len(piece), piece, f.tell() == size, timeout_s=60)
