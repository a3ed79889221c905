"""Files in a node's storage: code archives, cached data, outputs of jobs, and checkpoints."""
