"""Readers and checks of everything that others write: YAML, archives, folders, paths and locations."""
