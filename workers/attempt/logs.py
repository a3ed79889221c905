"""A rank's output, line by line into its log: time-stamped, named out or err, without secrets."""

import os
import re
import time
from pathlib import Path

from workers.attempt.redaction import Redactor

LONGEST_LINE_BYTES = 64 << 10
# A progress bar's carriage return ends a line too; one at the end of the data may be the first half of \r\n.
END_OF_LINE = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)


class RankLog:
    """Writes `2026-11-20T23:14:53.123456Z out TEXT`. A full disk costs lines, which are counted, never the attempt."""

    def __init__(self, path: Path, redact: Redactor):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._redact = redact
        self._rest = {"out": b"", "err": b""}
        self._lost = 0
        self.last_err = ""

    def feed(self, stream: str, data: bytes) -> None:
        *lines, rest = END_OF_LINE.split(self._rest[stream] + data)
        texts = [self._text(line) for line in lines]
        if len(rest) > LONGEST_LINE_BYTES:
            text, rest = self._cut(rest)
            texts.append(text)
        self._rest[stream] = rest
        self._write(stream, texts)

    def _cut(self, rest: bytes) -> tuple[str, bytes]:
        """A line without end is written in pieces; what could be the start of a secret stays for the next one."""
        clean = self._text(rest)
        keep = self._redact.longest
        return (clean[:-keep], clean[-keep:].encode()) if keep else (clean, b"")

    def _text(self, line: bytes) -> str:
        return self._redact(line.decode("utf-8", "backslashreplace"))

    def _write(self, stream: str, texts: list[str]) -> None:
        if not texts:
            return
        if stream == "err":
            self.last_err = next((t for t in reversed(texts) if t.strip()), self.last_err)
        stamp = _stamp()
        if self._lost:
            texts = [f"[polyfleet: {self._lost} lines lost, the disk was full]", *texts]
        if self._append("".join(f"{stamp} {stream} {text}\n" for text in texts).encode()):
            self._lost = 0
        else:
            self._lost += len(texts)

    def _append(self, data: bytes) -> bool:
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            return False
        return True

    def end(self, stream: str) -> None:
        """The stream has ended: write what came after its last line break."""
        rest, self._rest[stream] = self._rest[stream].rstrip(b"\r"), b""
        self._write(stream, [self._text(rest)] if rest else [])

    def close(self) -> None:
        self.end("out")
        self.end("err")
        os.close(self._file)


def _stamp() -> str:
    now_ns = time.time_ns()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_ns // 10**9))
    return f"{whole}.{now_ns // 1000 % 10**6:06d}Z"
