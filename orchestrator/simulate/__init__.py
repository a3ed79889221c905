"""Simulations of the core in virtual time.

`python -m orchestrator.simulate` tests the controller under random faults. `polyfleet simulate` replays traces of jobs
with the planner (modules traces, replay, outcome, charts).
"""
