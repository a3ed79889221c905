"""Simulation of recorded or written traces of jobs with the real planner, for `polyfleet simulate`."""
