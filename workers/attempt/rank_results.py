"""What the ranks of an attempt leave to be read, and the outcome that is told of it. Standard library only."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cluster import untrusted_files
from cluster.untrusted_files import UnreadableFile
from workers.attempt import reserved_files, wakeup_pipe
from workers.attempt.folders import MOST_RESULT_BYTES, AttemptFolder
from workers.attempt.redaction import Redactor
from workers.messages import Outcome

MOST_FAILURE_BYTES = 1 << 20
SHORT_TEXT = 1000
"""Of a message, where a full disk leaves no more space than the reserve."""


class RankResults:
    """Of one attempt. Everything is redacted as it is read."""

    def __init__(self, folder: AttemptFolder, redact: Redactor):
        self._folder = folder
        self._redact = redact

    def failure(self, rank: int) -> dict[str, Any] | None:
        """What a rank's child wrote of its failure; None for nothing that can be read."""
        try:
            said = untrusted_files.read_json(self._folder.failure(rank), MOST_FAILURE_BYTES)
            found = self._redact.plain(said, keys=False)
        except (FileNotFoundError, UnreadableFile):
            return None
        return found if isinstance(found, dict) else None

    def result(self) -> tuple[dict[str, Any], str]:
        """What rank 0 returned, and why it cannot be read."""
        try:
            found = self._redact.plain(untrusted_files.read_json(self._folder.result, MOST_RESULT_BYTES))
        except FileNotFoundError:
            return {}, ""
        except UnreadableFile as e:
            return {}, f"result.json {e.why}"
        return (found, "") if isinstance(found, dict) else ({}, "result.json holds no JSON object")

    def remove(self, ranks: Iterable[int]) -> None:
        """They hold what is redacted in the outcome."""
        for path in (self._folder.result, *map(self._folder.failure, ranks)):
            with suppress(OSError):
                path.unlink()

    def tell(self, done: Outcome) -> None:
        """On a full disk without what the reserve cannot hold."""
        failure = done.failure
        short = failure and replace(failure, traceback="", message=failure.message[:SHORT_TEXT])
        shorter = json.dumps(replace(done, result={}, failure=short).to_plain())
        reserved_files.replace_or_use_reserve(
            self._folder.outcome, json.dumps(done.to_plain()), durable=True, shorter=shorter
        )
        wakeup_pipe.notify(self._folder.path.parent)
