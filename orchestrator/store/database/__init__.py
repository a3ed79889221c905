"""Databases of the job store: SQLite, PostgreSQL, their tables and migrations, backup and restore."""
