"""Supervisor of an attempt: the process that starts the ranks, watches them and records how they ended."""
