"""Measure cases on one device: the session, timed blocks, checks, and the machine's state."""
