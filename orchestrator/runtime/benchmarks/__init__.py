"""Benchmark runs on the fleet: their jobs, their measurements, and the throughput that the planner learns from them."""
