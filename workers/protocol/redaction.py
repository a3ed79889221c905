"""Mask the secrets of an attempt: their values become `***` in logs, events, failures and results.

A secret is searched for as it is, and in the forms in which programs usually print it
(`secret_encodings.encoded_forms`). Streams are searched as they arrive, so the search must be fast for any number of
secrets: each aligned group of four bytes of the stream is looked up in a set of groups (grams), and a form is searched
for only if one of its grams occurs.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

NAMES_VARIABLE = "POLYFLEET_SECRETS"
"""Variable in a rank's environment with the comma-separated names of its variables that are secrets."""
MASK = b"***"
MIN_SECRET_LENGTH = 4
"""Minimum characters: shorter secrets are not masked, or every second word would be."""
GRAM_BYTES = 4
WINDOW_BYTES = 2 * GRAM_BYTES - 1
"""Any run of this many bytes contains one gram at an offset divisible by 4."""
MAX_LINES = 1000


class Redactor:
    """Masks secrets.

    `longest`: bytes of the longest form; `too_short`: number of secrets that are not masked.
    """

    def __init__(self, secrets: Iterable[str]):
        non_empty = [s for s in secrets if s]
        forms = _forms(s for s in non_empty if len(s) >= MIN_SECRET_LENGTH) if non_empty else []
        self.too_short = sum(len(s) < MIN_SECRET_LENGTH for s in non_empty)
        self._forms = forms
        self.longest = max(map(len, forms), default=0)
        self._short = [form for form in forms if len(form) < WINDOW_BYTES]
        self._by_gram: dict[int, list[bytes]] = defaultdict(list)
        for form in forms:
            for gram in _grams(form):
                self._by_gram[gram].append(form)
        self._grams = frozenset(self._by_gram)
        self._by_line = _index_lines(forms)

    @classmethod
    def for_rank(cls, environ: Mapping[str, str]) -> "Redactor":
        """Create one for files that a rank itself writes.

        Must precede user code, which may change the environment.
        """
        return cls(environ[name] for name in environ.get(NAMES_VARIABLE, "").split(",") if name in environ)

    def __call__(self, text: str) -> str:
        if not self.longest:
            return text
        data = text.encode("utf-8", "surrogatepass")
        clean = self.clean(data)
        return text if clean is data else clean.decode("utf-8", "surrogatepass")

    def clean(self, data: bytes) -> bytes:
        """Mask secrets. Returns `data` itself if it contains none."""
        if not self.longest:
            return data
        pieces, at = [], 0
        for start, end in self._spans(data):
            if start >= at:
                pieces += [data[at:start], MASK]
            at = max(at, end)
        return b"".join([*pieces, data[at:]]) if pieces else data

    def _spans(self, data: bytes) -> list[tuple[int, int]]:
        """Positions of all forms of secrets, in order; they may overlap."""
        aligned = memoryview(data)[: len(data) // GRAM_BYTES * GRAM_BYTES].cast("I")
        likely = {form for gram in self._grams.intersection(aligned) for form in self._by_gram[gram]}
        return sorted(span for form in (*likely, *self._short) for span in _occurrences(data, form))

    def partial_bytes(self, data: bytes) -> int:
        """Number of bytes at the end of `data` that may be the start of a secret."""
        tail = data[-self.longest :] if self.longest else b""
        return max((n for n in range(1, len(tail) + 1) if any(f.startswith(tail[-n:]) for f in self._forms)), default=0)

    def partial_line_bytes(self, lines: bytes) -> int:
        """Number of bytes at the end of these complete lines that may be the first lines of a longer secret."""
        last = lines[lines.rfind(b"\n", 0, -1) + 1 :]
        likely = (*self._by_line.get(b"", ()), *self._by_line.get(last, ()))
        return max((at for form, at in likely if lines.endswith(form[:at])), default=0)

    def clean_data(self, value: Any, *, keys: bool = True) -> Any:
        """Mask secrets in JSON-like data. Numbers stay as they are; so do keys of ours, with `keys` false."""
        if not self.longest:
            return value
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {self.clean_data(k) if keys else k: self.clean_data(v, keys=keys) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean_data(v, keys=keys) for v in value]
        return value


def _forms(secrets: Iterable[str]) -> list[bytes]:
    from workers.protocol.secret_encodings import encoded_forms

    return sorted({form for secret in secrets for form in encoded_forms(secret) if len(form) >= MIN_SECRET_LENGTH})


def _grams(form: bytes) -> Iterator[int]:
    """Yield grams of the middle of a form: its start is often a common word such as `https://`."""
    if len(form) >= WINDOW_BYTES:
        middle = (len(form) - WINDOW_BYTES) // 2
        for start in range(middle, middle + GRAM_BYTES):
            yield int.from_bytes(form[start : start + GRAM_BYTES], sys.byteorder)


def _occurrences(data: bytes, form: bytes) -> Iterator[tuple[int, int]]:
    at = data.find(form)
    while at >= 0:
        yield at, at + len(form)
        at = data.find(form, at + len(form))


def _index_lines(forms: list[bytes]) -> dict[bytes, list[tuple[bytes, int]]]:
    """Index forms of several lines by each of their lines but the last, with the offset after that.

    The first line's key is b"": in the stream, other text may precede it on its line.
    """
    by_line: dict[bytes, list[tuple[bytes, int]]] = defaultdict(list)
    for form in forms:
        at = 0
        for line in form.splitlines(keepends=True)[:MAX_LINES] if b"\n" in form[:-1] else ():
            key, at = line if at else b"", at + len(line)
            if at < len(form):
                by_line[key].append((form, at))
    return dict(by_line)
