"""Write a rank's output to its log, line by line: with time stamp and stream name, without secrets."""

import math
import re
import time
from pathlib import Path

from cluster.host.log_files import LogWriter
from workers.attempt.supervision.stderr_tail import StderrTail
from workers.protocol.redaction import Redactor

LIMIT_BYTES = 1 << 30
MAX_LINE_BYTES = 64 << 10
MAX_TEXT_LENGTH = 128 << 10
"""Characters, of up to four bytes: with its stamp a line is shorter than log_files.MAX_READ_BYTES."""
SILENT_S = 2.0
"""Silence after which an unfinished line is written: the last output before a program hangs matters most."""
MARK = "+"
# A progress bar's carriage return ends a line too.
END_OF_LINE = re.compile(rb"\r\n|\n|\r")


class RankLog:
    """Writes lines `2026-11-20T23:14:53.123456Z out TEXT`. On a full disk lines are lost and counted.

    A line that is written before its end is marked `out+` instead of `out`, its rest `+out`, or `+out+` if that has no
    end yet. Only a line feed ends a line of the log, and no TEXT contains one: output of a rank cannot imitate a time
    or a stream name.
    """

    def __init__(self, path: Path, redact: Redactor, limit_bytes: int = LIMIT_BYTES):
        self._log = LogWriter(path, limit_bytes)
        self._redact = redact
        self._rest = {"out": bytearray(), "err": bytearray()}
        self._unfinished: dict[str, str] = {}  # by stream: the part already written of a line that has not ended
        self._fed_s = {"out": 0.0, "err": 0.0}
        self._lost_lines = 0
        self.errors = StderrTail()
        if redact.too_short:
            subject = "a secret is" if redact.too_short == 1 else f"{redact.too_short} secrets are"
            self._write("err", [f"[polyfleet: {subject} shorter than 4 characters and not masked]"])

    def feed(self, stream: str, data: bytes) -> None:
        """Add output. Complete lines are written at once, unless a secret of several lines may start in them."""
        rest = self._rest[stream]
        search_from = max(len(rest) - 1, 0)
        rest += data
        self._fed_s[stream] = time.monotonic()
        # A carriage return at the end may be the first half of \r\n.
        end = max(rest.rfind(b"\n", search_from), rest.rfind(b"\r", search_from, len(rest) - 1)) + 1
        if end:
            block = bytes(rest[:end])
            if partial_bytes := self._redact.partial_line_bytes(block):
                end = block.rfind(b"\n", 0, end - partial_bytes) + 1
            del rest[:end]
            self._write(stream, self._texts(block[:end]))
        if len(rest) > MAX_LINE_BYTES + self._redact.longest:
            self._cut(stream)

    def flush(self) -> None:
        """Write unfinished lines of streams that were silent for SILENT_S.

        Bytes at the end that may be the start of a secret, of a character or of `\\r\\n` are not written yet.
        """
        until_s = time.monotonic() - SILENT_S
        for stream, rest in self._rest.items():
            if rest and self._fed_s[stream] <= until_s:
                self._fed_s[stream] = math.inf
                clean = self._redact.clean(bytes(rest))
                end = _complete_characters(clean, len(clean) - self._redact.partial_bytes(clean))
                end -= clean[:end].endswith(b"\r")
                self._rest[stream] = bytearray(clean[end:])
                *complete, last = END_OF_LINE.split(clean[:end])
                self._write(stream, _decode([*complete, last] if last else complete), unfinished=bool(last))

    def _cut(self, stream: str) -> None:
        """Write a piece of an overlong line; bytes that may be the start of a secret stay for the next piece."""
        clean = self._redact.clean(bytes(self._rest[stream]))
        end = _between_characters(clean, len(clean) - self._redact.longest)
        self._rest[stream] = bytearray(clean[end:])
        self._write(stream, self._texts(clean[:end]))

    def _texts(self, data: bytes) -> list[str]:
        lines = END_OF_LINE.split(self._redact.clean(data))
        if not lines[-1]:
            lines.pop()
        return _decode(lines)

    def _write(self, stream: str, texts: list[str], unfinished: bool = False) -> None:
        if not texts:
            return
        before = self._unfinished.pop(stream, None)
        marks = [stream] * len(texts)
        marks[0] = marks[0] if before is None else f"{MARK}{marks[0]}"
        if stream == "err":
            self.errors.add([(before or "") + texts[0], *texts[1:]], continues=before is not None)
        if unfinished:
            marks[-1] += MARK
            self._unfinished[stream] = (((before or "") if len(texts) == 1 else "") + texts[-1])[:MAX_TEXT_LENGTH]
        stamp = _stamp()
        lines = [f"{stamp} {mark} {text}\n" for mark, text in zip(marks, texts, strict=True)]
        if self._lost_lines:
            lines = [f"{stamp} {stream} [polyfleet: {self._lost_lines} lines lost, the disk was full]\n", *lines]
        data = "".join(lines).encode()
        written = self._log.append(data)
        lost = data.count(b"\n", written)
        self._lost_lines = self._lost_lines + lost - 1 if self._lost_lines and not written else lost

    def end(self, stream: str) -> None:
        """Write what is left of a stream that has ended."""
        rest, self._rest[stream] = bytes(self._rest[stream]).rstrip(b"\r"), bytearray()
        if rest or stream in self._unfinished:
            self._write(stream, self._texts(rest) or [""])

    def close(self) -> None:
        self.end("out")
        self.end("err")
        self._log.close()


def _decode(lines: list[bytes]) -> list[str]:
    return [piece for line in lines for piece in _pieces(line.decode("utf-8", "backslashreplace"))]


def _pieces(text: str) -> list[str]:
    """Split a text into pieces that are short enough for readers of the log, each a line of its own there."""
    return [text[start : start + MAX_TEXT_LENGTH] for start in range(0, max(len(text), 1), MAX_TEXT_LENGTH)]


def _between_characters(data: bytes, at: int) -> int:
    """Return `at`, or the start of the UTF-8 character that `at` would split."""
    at = max(at, 0)
    start = at
    while 0 < start < len(data) and at - start < 4 and data[start] & 0xC0 == 0x80:
        start -= 1
    return start if at - start < 4 else at


def _complete_characters(data: bytes, at: int) -> int:
    """Return `at`, or the start of a UTF-8 character before `at` whose rest has not arrived yet."""
    for back in range(1, min(at, 3) + 1):
        byte = data[at - back]
        if byte & 0xC0 != 0x80:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return at - back if back < needed else at
    return at


def _stamp() -> str:
    now_ns = time.time_ns()
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_ns // 10**9))
    return f"{seconds}.{now_ns // 1000 % 10**6:06d}Z"
