"""What happened, in short lines: for whoever looks for the cause of a violation."""

from typing import Any

from orchestrator.core import commands as c
from orchestrator.core import messages as m
from orchestrator.core.model import Event


def brief(what: Any) -> str:
    """One line of a message, an event or a command."""
    if isinstance(what, Event):
        told = {k: v for k, v in what.data.items() if k in ("leases", "reason", "outcome", "seen", "step")}
        return f"  event {what.job} {what.event} epoch {what.epoch} {told or ''}"
    if isinstance(what, m.Heartbeat):
        reports = [
            f"{r.job}.{r.epoch}.{r.node_rank} {r.phase} @{r.cursor} {r.outcome.state if r.outcome else ''}".strip()
            for r in what.reports
        ]
        there = None if what.attempts is None else sorted(what.attempts)
        return f"Heartbeat {what.node} {reports} there {there} epochs {dict(what.epochs)}"
    if isinstance(what, m.Submitted):
        return f"Submitted {[record.job.id for record in what.records]}"
    if isinstance(what, c.Launch):
        return f"  -> Launch {what.attempt} on {what.nodes}"
    if isinstance(what, m.NodesSeen):
        return f"NodesSeen {[row.name for row in what.nodes]}"
    arrow = "  -> " if type(what).__module__.endswith("commands") else ""
    return f"{arrow}{what!r}" if not isinstance(what, str) else what
