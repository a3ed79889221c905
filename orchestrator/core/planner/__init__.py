"""Decide on arrays, for all jobs together, which jobs run on which devices. Pure. See docs/decisions/0020."""
