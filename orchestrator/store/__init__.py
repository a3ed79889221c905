"""The event log in SQL: what makes an accepted job survive. SQLite on one machine, PostgreSQL when that is outgrown."""

from orchestrator.store.events import Answer, EventStore

__all__ = ["Answer", "EventStore"]
