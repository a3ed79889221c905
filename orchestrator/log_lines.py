"""Parse and join lines of a job's log as plain data. A line that was read before its end has `unfinished`; its rest
arrives as another line of the same rank and stream, which has `continues`. Both keys are present only if true.
"""

from collections.abc import Iterable, Mapping
from typing import Any

Data = dict[str, Any]
STREAMS = {"out": "stdout", "err": "stderr"}
CONTINUATION_MARK = "+"
"""Before a stream: continues the previous line; after it: the line is not complete."""


def parse_line(text: str, epoch: int, rank: int) -> Data:
    """Parse a line such as `2026-11-20T23:14:53.123456Z out hello`."""
    time, _, rest = text.partition(" ")
    marked, _, content = rest.partition(" ")
    stream = marked.removeprefix(CONTINUATION_MARK).removesuffix(CONTINUATION_MARK)
    line = {"time": time, "attempt": epoch, "rank": rank, "stream": STREAMS.get(stream, stream), "text": content}
    marks = {"continues": marked.startswith(CONTINUATION_MARK), "unfinished": marked.endswith(CONTINUATION_MARK)}
    return line | {name: True for name, is_so in marks.items() if is_so}


def line_source(line: Mapping[str, Any]) -> tuple[int, int, str]:
    """Attempt, rank and stream of a line: the pieces of one line have these in common."""
    return line["attempt"], line["rank"], line["stream"]


def join_lines(lines: Iterable[Mapping[str, Any]]) -> list[Data]:
    """Join the pieces of each line if its first piece is in `lines`; the line has the time of that piece."""
    result: list[Data] = []
    open_lines: dict[tuple[int, int, str], Data] = {}
    for line in lines:
        before = open_lines.pop(line_source(line), None)
        if before is not None and line.get("continues"):
            before["text"] += line["text"]
            if not line.get("unfinished"):
                del before["unfinished"]
        else:
            before = dict(line)
            result.append(before)
        if line.get("unfinished"):
            open_lines[line_source(line)] = before
    return result
