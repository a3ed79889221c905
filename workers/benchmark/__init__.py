"""Measure one device: the catalogue of cases, how they are built, timed and checked, and the session that does it."""
