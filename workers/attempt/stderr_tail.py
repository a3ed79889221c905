"""What a process printed last on stderr, and which of these lines says why it failed. Standard library only.

The last line often does not: torchrun ends with a row of `=`, torch.load with a link to its documentation.
"""

import re
from collections import deque
from typing import NamedTuple

from workers.attempt import disk_full

LAST_LINES = 50
MAX_ERRORS = 200
"""Of all ranks below a torchrun; in lines, of which each is cut to MAX_CHARACTERS."""
MAX_CHARACTERS = 4000

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
OF_RANK = re.compile(r"\[(?:rank|default)(?P<rank>\d{1,7})\]: ?(?P<text>.*)")
"""Of torch.distributed's own exception hook, and of `torchrun --tee`."""
ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*(?P<name>\w*(?:Error|Exception|Interrupt|Exit))(?::(?:\s.*)?)?")
WRAPPERS = frozenset({"ChildFailedError", "CalledProcessError", "ProcessRaisedException", "SignalException"})
"""Of launchers: they say that another process failed, whose own error came before."""
ROOT_CAUSE = re.compile(r"Root Cause\b.*")
ROOT_RANK = re.compile(r"\s*rank\s*: (?P<rank>\d{1,7})\b.*")
WITHOUT_A_REASON = re.compile(
    r"\W*|(traceback|error_file) *: .*|Check the documentation of .*|Set the environment variable HYDRA_FULL_ERROR.*"
)


class PrintedError(NamedTuple):
    """A line of the form `SomethingError: …`; `rank` of the process that printed it, None where no one says."""

    rank: int | None
    wraps: bool
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
        """`continues`: the first text is the newest line once more, with what was missing of it."""
        if continues:
            self._forget_newest()
        for text in texts:
            self._count += 1
            self._add(COLOUR.sub("", text[:MAX_CHARACTERS]))
        self._lines.extend(texts[-LAST_LINES:])

    def _forget_newest(self) -> None:
        if self._lines:
            self._lines.pop()
        if self._errors and self._errors[-1].line == self._count:
            self._errors.pop()
        self._count -= 1

    def _add(self, line: str) -> None:
        of_rank = OF_RANK.fullmatch(line)
        text = of_rank["text"] if of_rank else line
        if error := ERROR.fullmatch(text):
            rank = int(of_rank["rank"]) if of_rank else None
            self._errors.append(PrintedError(rank, error["name"] in WRAPPERS, text.strip(), self._count))
        elif ROOT_CAUSE.fullmatch(text):
            self._in_root_cause = True
        elif self._in_root_cause and (root := ROOT_RANK.fullmatch(text)):
            self._root, self._root_line, self._in_root_cause = int(root["rank"]), self._count, False

    @property
    def reason(self) -> str:
        """The last error of the rank that failed first, else the last line with words; "" without any.

        An error of long ago is none: a script may have gone on after it. That of a launcher's child is looked for
        further back, behind those of its sisters.
        """
        since = self._count - LAST_LINES
        recent = [it for it in self._errors if it.line > since]
        if self._root_line > since or any(it.wraps for it in recent):
            recent = list(self._errors)
        own = [it for it in recent if not it.wraps]
        return _of_first_rank(own, self._root) or self._last_words()

    def _last_words(self) -> str:
        lines = [COLOUR.sub("", line).strip() for line in reversed(self._lines)]
        said = next((line for line in lines if not WITHOUT_A_REASON.fullmatch(line)), "")
        return said or next((line for line in lines if line), "")

    @property
    def says_full(self) -> bool:
        """Whether one of the last lines tells of a full disk."""
        return any(map(disk_full.mentions_full_disk, self._lines))


def _of_first_rank(errors: list[PrintedError], root: int | None) -> str:
    """`root` is the rank that a launcher names as the first. Errors that no rank is named for count for all."""
    ranks = [it.rank for it in errors if it.rank is not None]
    first = root if root in ranks else next(iter(ranks), None)
    return next((it.text for it in reversed(errors) if first is None or it.rank == first), "")
