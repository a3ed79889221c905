"""Scheduling policies: functions from a snapshot to its waiting jobs in order. One policy per file."""

from collections.abc import Callable

from orchestrator.core.model import Job, Snapshot

Policy = Callable[[Snapshot], list[Job]]
