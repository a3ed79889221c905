"""Secrets of an attempt never reach a file of ours: their values become `***` in logs, events, failures and results.

A secret is looked for as it is and in the forms that programs usually print it in (`disguises.forms`). Streams are
searched as they arrive, so it must cost little whatever the number of secrets: the stream is cut into groups of four
bytes, each is looked up in a set, and only a form of which a group occurs is searched for.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

NAMES = "POLYFLEET_SECRETS"
"""In a rank's environment: names of its variables that are secrets, comma-separated."""
MASK = b"***"
SHORTEST = 4
"""Characters: a shorter secret stays as it is, or every second word would be masked."""
GRAM_BYTES = 4
WINDOW_BYTES = 2 * GRAM_BYTES - 1
"""So many bytes hold one gram at an offset divisible by 4, wherever they lie."""
MOST_LINES = 1000


class Redactor:
    """`longest` form in bytes; `too_short` counts the secrets that are not masked."""

    def __init__(self, secrets: Iterable[str]):
        given = [s for s in secrets if s]
        found = _forms(s for s in given if len(s) >= SHORTEST) if given else []
        self.too_short = sum(len(s) < SHORTEST for s in given)
        self._all = found
        self.longest = max(map(len, found), default=0)
        self._short = [form for form in found if len(form) < WINDOW_BYTES]
        self._by_gram: dict[int, list[bytes]] = defaultdict(list)
        for form in found:
            for gram in _grams(form):
                self._by_gram[gram].append(form)
        self._grams = frozenset(self._by_gram)
        self._several = _lines_of_several(found)

    @classmethod
    def of_rank(cls, environ: Mapping[str, str]) -> "Redactor":
        """For what a rank itself writes: made before the user's code runs, which may change its environment."""
        return cls(environ[name] for name in environ.get(NAMES, "").split(",") if name in environ)

    def __call__(self, text: str) -> str:
        if not self.longest:
            return text
        data = text.encode("utf-8", "surrogatepass")
        clean = self.clean(data)
        return text if clean is data else clean.decode("utf-8", "surrogatepass")

    def clean(self, data: bytes) -> bytes:
        """`data` itself where no secret is in it."""
        if not self.longest:
            return data
        pieces, at = [], 0
        for start, end in self._spans(data):
            if start >= at:
                pieces += [data[at:start], MASK]
            at = max(at, end)
        return b"".join([*pieces, data[at:]]) if pieces else data

    def _spans(self, data: bytes) -> list[tuple[int, int]]:
        """Where forms of secrets lie, in order; they may overlap."""
        aligned = memoryview(data)[: len(data) // GRAM_BYTES * GRAM_BYTES].cast("I")
        likely = {form for gram in self._grams.intersection(aligned) for form in self._by_gram[gram]}
        return sorted(span for form in (*likely, *self._short) for span in _occurrences(data, form))

    def started(self, data: bytes) -> int:
        """How many bytes at the end of `data` may be the first of a secret."""
        tail = data[-self.longest :] if self.longest else b""
        return max((n for n in range(1, len(tail) + 1) if any(f.startswith(tail[-n:]) for f in self._all)), default=0)

    def begun(self, lines: bytes) -> int:
        """How many bytes at the end of these whole lines may be the first lines of a secret that has more of them."""
        last = lines[lines.rfind(b"\n", 0, -1) + 1 :]
        likely = (*self._several.get(b"", ()), *self._several.get(last, ()))
        return max((at for form, at in likely if lines.endswith(form[:at])), default=0)

    def plain(self, value: Any, *, keys: bool = True) -> Any:
        """JSON-like data without secrets. Numbers stay numbers, and keys what they are where they are ours."""
        if not self.longest:
            return value
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {self.plain(k) if keys else k: self.plain(v, keys=keys) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(v, keys=keys) for v in value]
        return value


def _forms(secrets: Iterable[str]) -> list[bytes]:
    from workers.attempt.secret_encodings import (
        encoded_forms,  # most attempts have no secrets, and start sooner without it
    )

    return sorted({form for secret in secrets for form in encoded_forms(secret) if len(form) >= SHORTEST})


def _grams(form: bytes) -> Iterator[int]:
    """Of its middle: the start of a secret is often a word such as `https://`."""
    if len(form) >= WINDOW_BYTES:
        middle = (len(form) - WINDOW_BYTES) // 2
        for start in range(middle, middle + GRAM_BYTES):
            yield int.from_bytes(form[start : start + GRAM_BYTES], sys.byteorder)


def _occurrences(data: bytes, form: bytes) -> Iterator[tuple[int, int]]:
    at = data.find(form)
    while at >= 0:
        yield at, at + len(form)
        at = data.find(form, at + len(form))


def _lines_of_several(found: list[bytes]) -> dict[bytes, list[tuple[bytes, int]]]:
    """Forms of several lines, each with the offset behind one of them that is not its last. They are filed under that
    line, but under b"" for the first one, which need not begin a line of the stream.
    """
    by_line: dict[bytes, list[tuple[bytes, int]]] = defaultdict(list)
    for form in found:
        at = 0
        for line in form.splitlines(keepends=True)[:MOST_LINES] if b"\n" in form[:-1] else ():
            key, at = line if at else b"", at + len(line)
            if at < len(form):
                by_line[key].append((form, at))
    return dict(by_line)
