"""The nouns of `Orchestrator`."""
