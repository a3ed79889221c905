"""Measuring one device: what is measured (catalogue), how it is built, timed and checked, the session that does it."""
