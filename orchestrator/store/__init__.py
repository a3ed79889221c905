"""The job store: an event log in SQL, which makes accepted jobs durable. SQLite on one machine, or PostgreSQL.

This package and `events` import nothing: the command line reads `events.database_setting` and must not wait for
SQLAlchemy.
"""
