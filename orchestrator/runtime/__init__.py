"""Observe, plan, apply: the only part of the orchestrator that talks to Ray, and the only Ray driver."""
