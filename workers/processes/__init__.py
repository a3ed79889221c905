"""Processes of a node: find, limit and kill them, and tell whether memory or disk space ran out."""
