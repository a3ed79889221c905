"""Lines of a job's log as plain data. A line that was read before its end has `unfinished`; its rest comes as another
line of the same rank and stream, which has `continues`. Both keys are there only where they are true.
"""

from collections.abc import Iterable
from typing import Any

Data = dict[str, Any]
STREAMS = {"out": "stdout", "err": "stderr"}
MARK = "+"
"""Before a stream: goes on with its line; behind it: the line is not at its end."""


def parsed(text: str, epoch: int, rank: int) -> Data:
    """`2026-11-20T23:14:53.123456Z out hello` as its parts."""
    time, _, rest = text.partition(" ")
    marked, _, said = rest.partition(" ")
    stream = marked.removeprefix(MARK).removesuffix(MARK)
    line = {"time": time, "epoch": epoch, "rank": rank, "stream": STREAMS.get(stream, stream), "text": said}
    marks = {"continues": marked.startswith(MARK), "unfinished": marked.endswith(MARK)}
    return line | {name: True for name, is_so in marks.items() if is_so}


def source(line: Data) -> tuple[int, int, str]:
    """What the pieces of one line have in common: attempt, rank and stream."""
    return line["epoch"], line["rank"], line["stream"]


def joined(lines: Iterable[Data]) -> list[Data]:
    """With the pieces of each line put together, where the first of them is here too; the line has that one's time."""
    found: list[Data] = []
    open_lines: dict[tuple[int, int, str], Data] = {}
    for line in lines:
        before = open_lines.pop(source(line), None)
        if before is not None and line.get("continues"):
            before["text"] += line["text"]
            if not line.get("unfinished"):
                del before["unfinished"]
        else:
            before = dict(line)
            found.append(before)
        if line.get("unfinished"):
            open_lines[source(line)] = before
    return found
