"""Checkpoints of other programs: detect the format, and read it into entries. Nothing in them is trusted."""
