"""Attempts of jobs as the agent of their node sees them: prepare, start, follow and stop them."""
