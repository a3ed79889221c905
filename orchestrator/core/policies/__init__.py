"""A policy says who comes first: a function from a snapshot to its waiting jobs in order. One policy, one file."""

from collections.abc import Callable

from orchestrator.core.model import Job, Snapshot

Policy = Callable[[Snapshot], list[Job]]
