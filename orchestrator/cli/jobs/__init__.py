"""Commands for jobs, their logs, files and checkpoints."""
