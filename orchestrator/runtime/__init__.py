"""The server's Ray driver: observe nodes, plan, apply. No other part of the orchestrator imports Ray."""
