"""Checkpoints from one place to another: folders, object stores, nodes. Only what is missing travels."""
