"""The routes of files and of checkpoints that travel between this machine and a pool, as methods of the client."""

from urllib.parse import unquote

from cluster.errors import FleetError, NotFound
from cluster.folder_access import Piece, digest
from orchestrator.server_connection import Data, ServerConnection
from orchestrator.transport import PATIENT, non_empty, segment

RAW = {"Content-Type": "application/octet-stream"}
JSON = {"Content-Type": "application/json"}


class FileClient(ServerConnection):
    def files(self, ref: str, path: str = "", after: str = "") -> Data:
        """One page: {"job", "running", "folders", "entries", "after", "notes"}; go on with its job and `after`."""
        return self._told(f"/v1/jobs/{segment(ref)}/files", path=path, after=after)

    def file_piece(self, job: str, spot: Data, path: str, offset: int) -> Piece:
        """Raises FleetError where it arrived damaged."""
        asked = _spot(spot) | {"path": path, "offset": offset}
        response = self.answer("GET", f"/v1/jobs/{segment(job)}/files/content", params=asked, timeout=PATIENT)
        told = {name: response.headers[f"Polyfleet-{name}"] for name in ("sha256", "bytes", "version", "mode")}
        if digest(response.content) != told["sha256"]:
            raise FleetError(f"{path!r}: the piece at byte {offset} arrived damaged", "get it again")
        modified_s = float(response.headers["Polyfleet-modified-s"])
        return Piece(response.content, int(told["bytes"]), told["version"], modified_s, int(told["mode"]))

    def file_hashes(self, job: str, spot: Data, path: str, first: int) -> Data:
        return self._told(f"/v1/jobs/{segment(job)}/files/hashes", **_spot(spot), path=path, first=first)

    def file_place(self, ref: str, path: str) -> Data:
        """Where a file that is put goes: {"epoch", "node", "pool", "path", "running"}."""
        return self._told(f"/v1/jobs/{segment(ref)}/files/place", path=path)

    def files_put(self, job: str, spot: Data, upload: str, files: list[Data], force: bool) -> Data:
        body = {"upload": upload, "files": files, "force": force, **_spot(spot)}
        return self.post(f"/v1/jobs/{segment(job)}/files", body, timeout=PATIENT)

    def upload_begin(self, node: str, upload: str) -> dict[str, int]:
        """Files that an earlier try has sent, with their sizes."""
        there: dict[str, int] = self.post(f"/v1/uploads/{upload}", {}, params={"node": node})["there"]
        return there

    def upload_piece(self, node: str, upload: str, path: str, offset: int, data: bytes, end: Data | None) -> None:
        """`end`, {"size_bytes", "modified_s", "mode"}, with the piece after which the file is whole."""
        asked = {"node": node, "path": path, "offset": offset, "sha256": digest(data), **(end or {})}
        url = f"/v1/uploads/{upload}/content"
        self.call("PUT", url, params=asked, headers=RAW, timeout=PATIENT, content=data)

    def upload_hashes(self, node: str, upload: str, path: str, first: int) -> Data:
        return self._told(f"/v1/uploads/{upload}/hashes", node=node, path=path, first=first)

    def upload_discard(self, node: str, upload: str) -> None:
        self.call("DELETE", f"/v1/uploads/{upload}", params={"node": node}, headers=JSON)

    def data_has(self, sha256: str) -> bool:
        """Whether the server has that content."""
        try:
            self.call("HEAD", f"/v1/data/{sha256}")
        except NotFound:
            return False
        return True

    def data_keep(self, sha256: str, upload: str, single: str) -> Data:
        """What was sent as an upload without a node is all there: {"sha256", "bytes", "files"}"""
        return self.post(f"/v1/data/{sha256}", {"upload": upload, "single": single}, timeout=PATIENT)

    def _told(self, url: str, **asked: str | int) -> Data:
        """As `get`, whose own first parameter is called path."""
        told: Data = self.call("GET", url, params=asked)
        return told

    # -- checkpoints

    def checkpoint_manifest(self, ref: str) -> tuple[str, bytes]:
        """POOL:PATH of the checkpoint that is meant, and its manifest."""
        response = self.answer("GET", "/v1/checkpoints/manifest", params={"ref": ref}, timeout=PATIENT)
        return unquote(response.headers["Polyfleet-Checkpoint"]), response.content

    def checkpoint_chunk(self, ref: str, file: str, index: int) -> bytes:
        asked = non_empty(ref=ref, file=file, index=index)
        return self.answer("GET", "/v1/checkpoints/chunk", params=asked, timeout=PATIENT).content

    def checkpoint_place(self, target: str) -> Data:
        """{"node", "pool", "folder"} that POOL:FOLDER is written by and is."""
        return self.get("/v1/checkpoints/place", target=target)

    def checkpoint_begin(self, place: Data, name: str, manifest: bytes) -> Data:
        """{"arrived", "missing", "step", "files", "bytes"}. Raises Conflict while another copy of it is under way."""
        asked = {"node": place["node"], "folder": place["folder"], "name": name}
        told: Data = self.call(
            "PUT", "/v1/checkpoints/incoming", params=asked, headers=RAW, timeout=PATIENT, content=manifest
        )
        return told

    def checkpoint_send(self, place: Data, name: str, file: str, index: int, data: bytes) -> None:
        asked = {"node": place["node"], "folder": place["folder"], "name": name, "file": file, "index": index}
        self.call("PUT", "/v1/checkpoints/incoming/chunk", params=asked, headers=RAW, timeout=PATIENT, content=data)

    def checkpoint_left(self, place: Data, name: str) -> None:
        asked = {"node": place["node"], "folder": place["folder"], "name": name}
        self.call("DELETE", "/v1/checkpoints/incoming", params=asked, headers=JSON)

    def checkpoint_arrived(self, place: Data, name: str) -> Data:
        body = {"node": place["node"], "folder": place["folder"], "name": name}
        return self.post("/v1/checkpoints/arrived", body, timeout=PATIENT)


def _spot(spot: Data) -> Data:
    return {name: spot[name] for name in ("epoch", "node", "pool")}
