"""Verbs of `files`, written by docs/generate.py. Change orchestrator/verbs/files.py instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.client.link import Downloaded, Link
    from orchestrator.views.files import (
        DestinationView,
        DiscardedView,
        FilesPage,
        HashesView,
        PieceView,
        PlacedView,
        UploadView,
    )
    from orchestrator.views.values import JsonObject


class Files:
    def __init__(self, link: Link):
        self._link = link

    def list(self, ref: str, *, path: str = "", after: str = "") -> FilesPage:
        """Entries below `path`, at most 5,000 of each of the job's folders. Repeat with `after` until it is empty.

        `job` is the job's id, `folders` the location of its files: requests for pieces need both.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        - `path`: path in the job's folder, with `/`
        - `after`: `after` of the previous page
        """
        result: FilesPage = self._link.plain("GET", "/v1/jobs/{ref}/files", {"ref": ref, "path": path, "after": after})
        return result

    def read(self, ref: str, path: str, attempt: int, node: str, pool: str, *, offset: int = 0) -> Downloaded:
        """One piece of a file, at most 8 MiB. Headers have its SHA-256, and the file's size, version, time and mode.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        - `path`: path in the job's folder, with `/`
        - `attempt`: as in the listing
        - `node`: as in the listing
        - `pool`: as in the listing
        - `offset`: offset of the piece's first byte
        """
        return self._link.download(
            "/v1/jobs/{ref}/files/content",
            {"ref": ref, "path": path, "attempt": attempt, "node": node, "pool": pool, "offset": offset},
        )

    def hashes(self, ref: str, path: str, attempt: int, node: str, pool: str, *, first: int = 0) -> HashesView:
        """SHA-256 of some pieces from index `first` on, and the file's version.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        - `path`: path in the job's folder, with `/`
        - `attempt`: as in the listing
        - `node`: as in the listing
        - `pool`: as in the listing
        - `first`: index of the first piece, from 0
        """
        result: HashesView = self._link.plain(
            "GET",
            "/v1/jobs/{ref}/files/hashes",
            {"ref": ref, "path": path, "attempt": attempt, "node": node, "pool": pool, "first": first},
        )
        return result

    def destination(self, ref: str, *, path: str = "") -> DestinationView:
        """Where a file that is put is stored: attempt, node, pool and path in the job's folder.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        - `path`: path in the job's folder, with `/`
        """
        result: DestinationView = self._link.plain("GET", "/v1/jobs/{ref}/files/place", {"ref": ref, "path": path})
        return result

    def put(
        self,
        ref: str,
        upload: str,
        files: Sequence[JsonObject],
        attempt: int,
        node: str,
        pool: str,
        *,
        force: bool = False,
        key: str = "",
    ) -> PlacedView:
        """Move files of an upload into the job's folder. 409 for a file that exists: always while the job runs, else
        if it differs and `force` is not set.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        - `attempt`: from `files/place`, like `node` and `pool`
        - `force`: overwrite files that differ; never while the job runs
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: PlacedView = self._link.plain(
            "POST",
            "/v1/jobs/{ref}/files",
            {"ref": ref},
            {"upload": upload, "files": files, "attempt": attempt, "node": node, "pool": pool, "force": force},
            key=key,
            is_slow=True,
        )
        return result

    def begin_upload(self, upload: str, node: str) -> UploadView:
        """Begin or resume an upload on a node. Returns the files that have already been sent, with their sizes.

        - `node`: as in the listing
        """
        result: UploadView = self._link.plain(
            "POST", "/v1/uploads/{upload}", {"upload": upload, "node": node}, is_slow=True
        )
        return result

    def send_piece(
        self,
        upload: str,
        node: str,
        path: str,
        sha256: str,
        data: bytes,
        *,
        offset: int = 0,
        size_bytes: int = -1,
        modified_s: float = 0.0,
        mode: int = 420,
        pieces_sha256: str = "",
    ) -> PieceView:
        """Send one piece, at most 8 MiB, as `application/octet-stream`. Refused if its SHA-256 differs. After the
        last piece the file is read back, and refused if `whole` differs.

        - `node`: as in the listing
        - `path`: path in the job's folder, with `/`
        - `sha256`: SHA-256 of the piece
        - `offset`: offset of the piece's first byte
        - `size_bytes`: size of the file that this piece completes
        - `pieces_sha256`: SHA-256 of the pieces' SHA-256, as text
        """
        result: PieceView = self._link.upload(
            "PUT",
            "/v1/uploads/{upload}/content",
            {
                "upload": upload,
                "node": node,
                "path": path,
                "sha256": sha256,
                "offset": offset,
                "size_bytes": size_bytes,
                "modified_s": modified_s,
                "mode": mode,
                "whole": pieces_sha256,
            },
            data,
            "application/octet-stream",
        )
        return result

    def upload_hashes(self, upload: str, node: str, path: str, *, first: int = 0) -> HashesView:
        """SHA-256 of some pieces of a file that was sent.

        - `node`: as in the listing
        - `path`: path in the job's folder, with `/`
        - `first`: index of the first piece, from 0
        """
        result: HashesView = self._link.plain(
            "GET", "/v1/uploads/{upload}/hashes", {"upload": upload, "node": node, "path": path, "first": first}
        )
        return result

    def discard_upload(self, upload: str, node: str) -> DiscardedView:
        """Remove files of an upload that were not moved to a job. They are otherwise removed after a week.

        - `node`: as in the listing
        """
        result: DiscardedView = self._link.plain("DELETE", "/v1/uploads/{upload}", {"upload": upload, "node": node})
        return result
