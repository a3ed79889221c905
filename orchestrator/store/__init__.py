"""The event log in SQL: what makes an accepted job survive. SQLite on one machine, PostgreSQL when that is outgrown.

Nothing is imported here: the command line reads `setting`, and must not wait for SQLAlchemy.
"""
