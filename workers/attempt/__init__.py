"""Run one placement of a job on one node: its folder, its supervisor and its ranks, until all have ended."""
