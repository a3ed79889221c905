"""Benchmark runs: plan jobs on several targets, measure them in common rounds, compare and report the results."""
