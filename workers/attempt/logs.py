"""A rank's output, line by line into its log: time-stamped, named out or err, without secrets."""

import re
import time
from pathlib import Path

from cluster.log_files import Writer
from workers.attempt.redaction import Redactor
from workers.attempt.stderr_tail import StderrTail

LIMIT_BYTES = 1 << 30
LONGEST_LINE_BYTES = 64 << 10
LONGEST_TEXT = 128 << 10
"""Characters, of up to four bytes: with its stamp a line is shorter than log_files.LONGEST_READ_BYTES."""
# A progress bar's carriage return ends a line too.
END_OF_LINE = re.compile(rb"\r\n|\n|\r")


class RankLog:
    """Writes `2026-11-20T23:14:53.123456Z out TEXT`. A full disk costs lines, which are counted, never the attempt.

    Nothing but a line feed ends a line of the log, and none is in a TEXT: what a rank prints is never taken for another
    time or stream.
    """

    def __init__(self, path: Path, redact: Redactor, limit_bytes: int = LIMIT_BYTES):
        self._log = Writer(path, limit_bytes)
        self._redact = redact
        self._rest = {"out": bytearray(), "err": bytearray()}
        self._lost = 0
        self.errors = StderrTail()
        if redact.too_short:
            said = "a secret is" if redact.too_short == 1 else f"{redact.too_short} secrets are"
            self._write("err", [f"[polyfleet: {said} shorter than 4 characters and not masked]"])

    def feed(self, stream: str, data: bytes) -> None:
        """Whole lines are written at once, unless they may be the first lines of a secret of several."""
        rest = self._rest[stream]
        searched = max(len(rest) - 1, 0)
        rest += data
        # A carriage return at the end may be the first half of \r\n.
        whole = max(rest.rfind(b"\n", searched), rest.rfind(b"\r", searched, len(rest) - 1)) + 1
        if whole:
            block = bytes(rest[:whole])
            if begun := self._redact.begun(block):
                whole = block.rfind(b"\n", 0, whole - begun) + 1
            del rest[:whole]
            self._write(stream, self._texts(block[:whole]))
        if len(rest) > LONGEST_LINE_BYTES + self._redact.longest:
            self._cut(stream)

    def _cut(self, stream: str) -> None:
        """A line without end is written in pieces; what could be the start of a secret stays for the next one."""
        clean = self._redact.clean(bytes(self._rest[stream]))
        at = _between_characters(clean, len(clean) - self._redact.longest)
        self._rest[stream] = bytearray(clean[at:])
        self._write(stream, self._texts(clean[:at]))

    def _texts(self, data: bytes) -> list[str]:
        lines = END_OF_LINE.split(self._redact.clean(data))
        if not lines[-1]:
            lines.pop()
        return [piece for line in lines for piece in _pieces(line.decode("utf-8", "backslashreplace"))]

    def _write(self, stream: str, texts: list[str]) -> None:
        if not texts:
            return
        if stream == "err":
            self.errors.add(texts)
        stamp = _stamp()
        if self._lost:
            texts = [f"[polyfleet: {self._lost} lines lost, the disk was full]", *texts]
        data = "".join(f"{stamp} {stream} {text}\n" for text in texts).encode()
        written = self._log.append(data)
        lost = data.count(b"\n", written)
        self._lost = self._lost + lost - 1 if self._lost and not written else lost

    def end(self, stream: str) -> None:
        """The stream has ended: write what came after its last line break."""
        rest, self._rest[stream] = bytes(self._rest[stream]).rstrip(b"\r"), bytearray()
        if rest:
            self._write(stream, self._texts(rest))

    def close(self) -> None:
        self.end("out")
        self.end("err")
        self._log.close()


def _pieces(text: str) -> list[str]:
    """So short that a reader always gets a whole line: what follows a cut looks like a line of its own."""
    return [text[start : start + LONGEST_TEXT] for start in range(0, max(len(text), 1), LONGEST_TEXT)]


def _between_characters(data: bytes, at: int) -> int:
    """`at`, or the start of the UTF-8 character it would cut."""
    at = max(at, 0)
    start = at
    while 0 < start < len(data) and at - start < 4 and data[start] & 0xC0 == 0x80:
        start -= 1
    return start if at - start < 4 else at


def _stamp() -> str:
    now_ns = time.time_ns()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_ns // 10**9))
    return f"{whole}.{now_ns // 1000 % 10**6:06d}Z"
