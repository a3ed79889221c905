"""Checkpoints of pools: find, check and copy them, and choose the one that an attempt resumes from."""
