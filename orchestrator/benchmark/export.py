"""Runs for other tools: JSON lines, CSV, Parquet, pytest-benchmark's and asv's JSON."""

import json
from collections.abc import Iterable
from typing import Any

Data = dict[str, Any]


def to_jsonl(lines: Iterable[Data]) -> str:
    """One JSON object per line, as they were measured: docs/benchmark-format.md."""
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
