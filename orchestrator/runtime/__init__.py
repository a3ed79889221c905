"""The server's Ray driver: observe nodes, plan, apply. In the orchestrator, only `agents` here imports Ray."""
