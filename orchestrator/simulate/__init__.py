"""The core in worlds that are simulated, in virtual time: the controller against every fault that a seed chooses
(`python -m orchestrator.simulate`), and the planner on traces of jobs (`polyfleet simulate`: traces, replay, outcome,
pictures).
"""
