"""Commands that measure devices, compare results, and simulate traces of jobs."""
