"""Short lines for messages, events and commands, to find the cause of a violation."""

from typing import Any

from orchestrator.core.controller import commands as c
from orchestrator.core.controller import messages as m
from orchestrator.core.model import Event


def describe(item: Any) -> str:
    """Describe a message, an event or a command in one line."""
    if isinstance(item, Event):
        fields = {k: v for k, v in item.data.items() if k in ("leases", "reason", "outcome", "seen", "step")}
        return f"  event {item.job} {item.event} epoch {item.epoch} {fields or ''}"
    if isinstance(item, m.Heartbeat):
        statuses = [
            f"{r.job}.{r.epoch}.{r.node_rank} {r.phase} @{r.cursor} {r.outcome.state if r.outcome else ''}".strip()
            for r in item.reports
        ]
        running = None if item.attempts is None else sorted(item.attempts)
        return f"Heartbeat {item.node} {statuses} there {running} epochs {dict(item.epochs)}"
    if isinstance(item, m.Submitted):
        return f"Submitted {[record.job.id for record in item.records]}"
    if isinstance(item, c.Launch):
        return f"  -> Launch {item.attempt} on {item.nodes}"
    if isinstance(item, m.NodesListed):
        return f"NodesSeen {[row.name for row in item.nodes]}"
    arrow = "  -> " if type(item).__module__.endswith("commands") else ""
    return f"{arrow}{item!r}" if not isinstance(item, str) else item
