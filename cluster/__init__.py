"""Shared types, accelerator facts, pools, environments, and the Ray cluster that runs them.

Imports neither `workers` nor `orchestrator`.
"""
