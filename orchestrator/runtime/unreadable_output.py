"""Findings about job code that wrote what its node, or the server, cannot use."""

from collections.abc import Iterable, Iterator
from typing import Any

from cluster.types import Finding


def findings(poison: Iterable[tuple[str, dict[str, dict[str, Any]]]]) -> Iterator[tuple[str, Finding]]:
    """(node, finding) for each attempt whose ranks did; the subject is the job."""
    for node, attempts in poison:
        for key, told in sorted(attempts.items()):
            job = key.rsplit(".", 2)[0]
            times = "once" if told["count"] == 1 else f"{told['count']} times"
            message = f"attempt {key} wrote invalid output {times}; the last: {told['reason']}"
            yield node, Finding("warning", job, message, f"`polyfleet logs {job}`, or `polyfleet cancel {job}`")
