"""Keep the last lines of a process's stderr, and choose the one that says why it failed.

Standard library only.

The last line is often not the one: torchrun ends with a row of `=`, torch.load with a link to its documentation.
"""

import re
from collections import deque
from typing import NamedTuple

from workers.processes import disk_full

LAST_LINES = 50
MAX_ERRORS = 200
"""Maximum number of lines with errors, of all ranks below a torchrun; each is cut to MAX_CHARACTERS."""
MAX_CHARACTERS = 4000

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RANK_PREFIX = re.compile(r"\[(?:rank|default)(?P<rank>\d{1,7})\]: ?(?P<text>.*)")
"""Prefix that torch.distributed's exception hook and `torchrun --tee` put before a line."""
ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*(?P<name>\w*(?:Error|Exception|Interrupt|Exit))(?::(?:\s.*)?)?")
WRAPPERS = frozenset({"ChildFailedError", "CalledProcessError", "ProcessRaisedException", "SignalException"})
"""Errors of launchers: they report that another process failed, whose own error was printed before."""
ROOT_CAUSE = re.compile(r"Root Cause\b.*")
ROOT_RANK = re.compile(r"\s*rank\s*: (?P<rank>\d{1,7})\b.*")
UNINFORMATIVE = re.compile(
    r"\W*|(traceback|error_file) *: .*|Check the documentation of .*|Set the environment variable HYDRA_FULL_ERROR.*"
)


class PrintedError(NamedTuple):
    """A line of the form `SomethingError: …`. `rank`: of the process that printed it, None if unknown."""

    rank: int | None
    is_wrapper: bool
    text: str
    line: int


class StderrTail:
    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._errors: deque[PrintedError] = deque(maxlen=MAX_ERRORS)
        self._count = 0
        self._root: int | None = None  # the rank that torchrun names as the first to fail
        self._root_line = 0
        self._in_root_cause = False

    def add(self, texts: list[str], continues: bool = False) -> None:
        """Add lines. `continues`: the first one replaces the newest line, which was incomplete."""
        if continues:
            self._drop_newest()
        for text in texts:
            self._count += 1
            self._add(COLOUR.sub("", text[:MAX_CHARACTERS]))
        self._lines.extend(texts[-LAST_LINES:])

    def _drop_newest(self) -> None:
        if self._lines:
            self._lines.pop()
        if self._errors and self._errors[-1].line == self._count:
            self._errors.pop()
        self._count -= 1

    def _add(self, line: str) -> None:
        rank_match = RANK_PREFIX.fullmatch(line)
        text = rank_match["text"] if rank_match else line
        if error := ERROR.fullmatch(text):
            rank = int(rank_match["rank"]) if rank_match else None
            self._errors.append(PrintedError(rank, error["name"] in WRAPPERS, text.strip(), self._count))
        elif ROOT_CAUSE.fullmatch(text):
            self._in_root_cause = True
        elif self._in_root_cause and (root := ROOT_RANK.fullmatch(text)):
            self._root, self._root_line, self._in_root_cause = int(root["rank"]), self._count, False

    @property
    def reason(self) -> str:
        """The last error of the rank that failed first, else the last line with a text; "" if there is none.

        Errors above the last LAST_LINES lines do not count: the script may have continued after them. If a launcher
        reports a failed child, its error is searched for further back, as other ranks may have printed theirs after it.
        """
        first_line = self._count - LAST_LINES
        recent = [error for error in self._errors if error.line > first_line]
        if self._root_line > first_line or any(error.is_wrapper for error in recent):
            recent = list(self._errors)
        own_errors = [error for error in recent if not error.is_wrapper]
        return _error_of_first_rank(own_errors, self._root) or self._last_text()

    def _last_text(self) -> str:
        lines = [COLOUR.sub("", line).strip() for line in reversed(self._lines)]
        reason = next((line for line in lines if not UNINFORMATIVE.fullmatch(line)), "")
        return reason or next((line for line in lines if line), "")

    @property
    def mentions_full_disk(self) -> bool:
        """Return whether one of the last lines mentions a full disk."""
        return any(map(disk_full.mentions_full_disk, self._lines))


def _error_of_first_rank(errors: list[PrintedError], root: int | None) -> str:
    """The last error of the first rank that failed: `root`, if a launcher named one.

    Without any rank: of all.
    """
    ranks = [error.rank for error in errors if error.rank is not None]
    first = root if root in ranks else next(iter(ranks), None)
    return next((error.text for error in reversed(errors) if first is None or error.rank == first), "")
