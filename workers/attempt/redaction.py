"""Secrets of an attempt never reach a file of ours: their values become `***` in logs, failures and results."""

import json
import re
from base64 import b64encode
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

MASK = "***"
SHORTEST_LINE = 8


class Redactor:
    """Knows a secret as it is, in base64, URL-encoded and JSON-escaped, and the longer lines of one with many lines."""

    def __init__(self, secrets: Iterable[str]):
        words = sorted({w for s in secrets if s for w in _forms(s)}, key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(w) for w in words)) if words else None
        self.longest = max((len(w) for w in words), default=0)

    def __call__(self, text: str) -> str:
        return self._pattern.sub(MASK, text) if self._pattern else text

    def plain(self, value: Any) -> Any:
        """A copy of JSON-like data without secrets, keys included."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {self.plain(k): self.plain(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.plain(v) for v in value]
        return value


def _forms(secret: str) -> set[str]:
    forms = {secret, quote(secret, safe=""), json.dumps(secret)[1:-1], b64encode(secret.encode()).decode().rstrip("=")}
    lines = secret.splitlines()
    return forms | ({line for line in lines if len(line) >= SHORTEST_LINE} if len(lines) > 1 else set())
