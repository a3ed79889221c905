"""Processes of a node: find, limit and kill them, and detect whether memory or disk space ran out."""
