"""Read result and failure files of an attempt's ranks, and write its outcome. Standard library only."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cluster.input import untrusted_files
from cluster.input.untrusted_files import UnreadableFile
from workers.protocol import reserved_files, wakeup_pipe
from workers.protocol.folders import MAX_RESULT_BYTES, AttemptFolder
from workers.protocol.messages import Outcome
from workers.protocol.redaction import Redactor

MAX_FAILURE_BYTES = 1 << 20
MAX_SHORT_TEXT = 1000
"""Characters of a message if a full disk leaves only the reserved space."""


class RankResults:
    """Result files of one attempt. Secrets are masked when a file is read."""

    def __init__(self, folder: AttemptFolder, redact: Redactor):
        self._folder = folder
        self._redact = redact

    def failure(self, rank: int) -> dict[str, Any] | None:
        """The failure record that a rank wrote; None if there is none that can be read."""
        try:
            data = untrusted_files.read_json(self._folder.failure(rank), MAX_FAILURE_BYTES)
            record = self._redact.clean_data(data, keys=False)
        except (FileNotFoundError, UnreadableFile):
            return None
        return record if isinstance(record, dict) else None

    def result(self) -> tuple[dict[str, Any], str]:
        """Return the result of rank 0, and why it cannot be read ("" if it can)."""
        try:
            data = self._redact.clean_data(untrusted_files.read_json(self._folder.result, MAX_RESULT_BYTES))
        except FileNotFoundError:
            return {}, ""
        except UnreadableFile as e:
            return {}, f"result.json {e.reason}"
        return (data, "") if isinstance(data, dict) else ({}, "result.json is not a JSON object")

    def delete_files(self, ranks: Iterable[int]) -> None:
        """Remove the files, which contain secrets that are masked in the outcome."""
        for path in (self._folder.result, *map(self._folder.failure, ranks)):
            with suppress(OSError):
                path.unlink()

    def write_outcome(self, outcome: Outcome) -> None:
        """Write the outcome and wake the agent.

        On a full disk, drop what does not fit into the reserved space.
        """
        failure = outcome.failure
        short = failure and replace(failure, traceback="", message=failure.message[:MAX_SHORT_TEXT])
        shorter = json.dumps(replace(outcome, result={}, failure=short).to_plain())
        reserved_files.replace_or_use_reserve(
            self._folder.outcome, json.dumps(outcome.to_plain()), durable=True, shorter=shorter
        )
        wakeup_pipe.notify(self._folder.path.parent)
