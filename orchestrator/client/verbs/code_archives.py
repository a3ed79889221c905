"""Verbs of `code_archives`, written by docs/generate.py. Change orchestrator/verbs/code_archives.py instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from orchestrator.client.link import Link
    from orchestrator.views.files import CodeArchiveView


class CodeArchives:
    def __init__(self, link: Link):
        self._link = link

    def check(self, sha: str) -> bool:
        """200 if the server has the code archive, so that it need not be sent again, else 404.

        - `sha`: SHA-256 of the archive, hexadecimal
        """
        return self._link.exists("/v1/code-archives/{sha}", {"sha": sha})

    def put(self, sha: str, upload: BinaryIO) -> CodeArchiveView:
        """Store a zip archive (`Content-Type: application/zip`, at most 512 MiB). Refused if its SHA-256 differs.

        - `sha`: SHA-256 of the archive, hexadecimal
        """
        result: CodeArchiveView = self._link.upload(
            "PUT", "/v1/code-archives/{sha}", {"sha": sha}, upload, "application/zip"
        )
        return result
