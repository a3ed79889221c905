"""Client methods for the routes that copy files and checkpoints between this machine and a pool."""

from urllib.parse import unquote

from cluster.errors import FleetError, NotFound
from cluster.input.folder_access import Piece, digest
from orchestrator.client.server_connection import Data, ServerConnection
from orchestrator.client.transport import NO_TIMEOUT, non_empty, segment

RAW = {"Content-Type": "application/octet-stream"}
JSON = {"Content-Type": "application/json"}


class FileClient(ServerConnection):
    def files(self, ref: str, path: str = "", after: str = "") -> Data:
        """One page of files: {"job", "running", "folders", "entries", "after", "notes"}. For the next page, pass its
        job and `after`.
        """
        return self._get_json(f"/v1/jobs/{segment(ref)}/files", path=path, after=after)

    def file_piece(self, job: str, folder: Data, path: str, offset: int) -> Piece:
        """Read one piece of a file. Raises FleetError if it arrived damaged."""
        params = _folder_params(folder) | {"path": path, "offset": offset}
        response = self.send_request("GET", f"/v1/jobs/{segment(job)}/files/content", params=params, timeout=NO_TIMEOUT)
        headers = {name: response.headers[f"Polyfleet-{name}"] for name in ("sha256", "bytes", "version", "mode")}
        if digest(response.content) != headers["sha256"]:
            raise FleetError(f"{path!r}: the piece at byte {offset} arrived damaged", "run the command again")
        modified_s = float(response.headers["Polyfleet-modified-s"])
        return Piece(response.content, int(headers["bytes"]), headers["version"], modified_s, int(headers["mode"]))

    def file_hashes(self, job: str, folder: Data, path: str, first: int) -> Data:
        return self._get_json(f"/v1/jobs/{segment(job)}/files/hashes", **_folder_params(folder), path=path, first=first)

    def file_destination(self, ref: str, path: str) -> Data:
        """Where a file that is put is stored: {"attempt", "node", "pool", "path", "running"}."""
        return self._get_json(f"/v1/jobs/{segment(ref)}/files/place", path=path)

    def files_put(self, job: str, folder: Data, upload: str, files: list[Data], force: bool) -> Data:
        body = {"upload": upload, "files": files, "force": force, **_folder_params(folder)}
        return self.post(f"/v1/jobs/{segment(job)}/files", body, timeout=NO_TIMEOUT)

    def upload_begin(self, node: str, upload: str) -> dict[str, int]:
        """Begin an upload. Returns the files that an earlier try has sent, with their sizes."""
        sizes: dict[str, int] = self.post(f"/v1/uploads/{upload}", {}, params={"node": node})["there"]
        return sizes

    def upload_piece(self, node: str, upload: str, path: str, offset: int, data: bytes, end: Data | None) -> None:
        """Send one piece of a file; the last one with `end`: {"size_bytes", "modified_s", "mode"}."""
        params = {"node": node, "path": path, "offset": offset, "sha256": digest(data), **(end or {})}
        url = f"/v1/uploads/{upload}/content"
        self.call("PUT", url, params=params, headers=RAW, timeout=NO_TIMEOUT, content=data)

    def upload_hashes(self, node: str, upload: str, path: str, first: int) -> Data:
        return self._get_json(f"/v1/uploads/{upload}/hashes", node=node, path=path, first=first)

    def upload_discard(self, node: str, upload: str) -> None:
        self.call("DELETE", f"/v1/uploads/{upload}", params={"node": node}, headers=JSON)

    def data_has(self, sha256: str) -> bool:
        """Return whether the server has the data with that hash."""
        try:
            self.call("HEAD", f"/v1/data/{sha256}")
        except NotFound:
            return False
        return True

    def data_keep(self, sha256: str, upload: str, single: str) -> Data:
        """Complete an upload without a node as data named by its hash: {"sha256", "bytes", "files"}."""
        return self.post(f"/v1/data/{sha256}", {"upload": upload, "single": single}, timeout=NO_TIMEOUT)

    def _get_json(self, url: str, **params: str | int) -> Data:
        """Like `get`, but it accepts a query parameter named path."""
        result: Data = self.call("GET", url, params=params)
        return result

    # -- checkpoints

    def checkpoint_manifest(self, ref: str) -> tuple[str, bytes]:
        """POOL:PATH of the checkpoint that `ref` resolves to, and its manifest."""
        response = self.send_request("GET", "/v1/checkpoints/manifest", params={"ref": ref}, timeout=NO_TIMEOUT)
        return unquote(response.headers["Polyfleet-Checkpoint"]), response.content

    def checkpoint_chunk(self, ref: str, file: str, index: int) -> bytes:
        params = non_empty(ref=ref, file=file, index=index)
        return self.send_request("GET", "/v1/checkpoints/chunk", params=params, timeout=NO_TIMEOUT).content

    def checkpoint_destination(self, target: str) -> Data:
        """{"node", "pool", "folder"} for writing to POOL:FOLDER: `node` writes it."""
        return self.get("/v1/checkpoints/place", target=target)

    def checkpoint_begin(self, destination: Data, name: str, manifest: bytes) -> Data:
        """Begin a copy: {"arrived", "missing", "step", "files", "bytes"}. Raises Conflict while another copy of the
        same checkpoint is running.
        """
        params = {"node": destination["node"], "folder": destination["folder"], "name": name}
        reply: Data = self.call(
            "PUT", "/v1/checkpoints/incoming", params=params, headers=RAW, timeout=NO_TIMEOUT, content=manifest
        )
        return reply

    def checkpoint_send(self, destination: Data, name: str, file: str, index: int, data: bytes) -> None:
        params = {
            "node": destination["node"],
            "folder": destination["folder"],
            "name": name,
            "file": file,
            "index": index,
        }
        self.call("PUT", "/v1/checkpoints/incoming/chunk", params=params, headers=RAW, timeout=NO_TIMEOUT, content=data)

    def checkpoint_interrupt(self, destination: Data, name: str) -> None:
        params = {"node": destination["node"], "folder": destination["folder"], "name": name}
        self.call("DELETE", "/v1/checkpoints/incoming", params=params, headers=JSON)

    def checkpoint_commit(self, destination: Data, name: str) -> Data:
        body = {"node": destination["node"], "folder": destination["folder"], "name": name}
        return self.post("/v1/checkpoints/arrived", body, timeout=NO_TIMEOUT)


def _folder_params(folder: Data) -> Data:
    return {name: folder[name] for name in ("attempt", "node", "pool")}
