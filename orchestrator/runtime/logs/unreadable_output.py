"""Findings about jobs whose code wrote output that its node or the server cannot read."""

from collections.abc import Iterable, Iterator
from typing import Any

from cluster.types import Finding


def findings(by_node: Iterable[tuple[str, dict[str, dict[str, Any]]]]) -> Iterator[tuple[str, Finding]]:
    """Yield (node, finding) for each attempt with unreadable output. The subject of a finding is the job."""
    for node, attempts in by_node:
        for key, record in sorted(attempts.items()):
            job = key.rsplit(".", 2)[0]
            times = "once" if record["count"] == 1 else f"{record['count']} times"
            message = f"attempt {key} wrote invalid output {times}; the last: {record['reason']}"
            yield node, Finding("warning", job, message, f"run `polyfleet logs {job}`, or `polyfleet cancel {job}`")
