"""The event log in SQL: what makes an accepted job survive. SQLite on one machine, PostgreSQL when that is outgrown."""

from orchestrator.store.events import EventStore
from orchestrator.store.once import Answer, Asked

__all__ = ["Answer", "Asked", "EventStore"]
