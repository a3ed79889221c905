"""Verbs of `data`, written by docs/generate.py. Change orchestrator/verbs/data.py instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.client.link import Link
    from orchestrator.views.files import DataView


class Data:
    def __init__(self, link: Link):
        self._link = link

    def check(self, sha: str) -> bool:
        """200 if the server has the data, so that it need not be sent again, else 404.

        - `sha`: SHA-256 of a file, or of a folder's list of hashes
        """
        return self._link.exists("/v1/data/{sha}", {"sha": sha})

    def store(self, sha: str, upload: str, *, single: str = "") -> DataView:
        """Complete the upload `upload`, sent with an empty node; `single` is its only file, "" for a folder. All
        data is hashed; it is refused if the hash differs.

        - `sha`: SHA-256 of a file, or of a folder's list of hashes
        - `single`: path of the only file in the upload, or empty
        """
        result: DataView = self._link.plain(
            "POST", "/v1/data/{sha}", {"sha": sha}, {"upload": upload, "single": single}, is_slow=True
        )
        return result
