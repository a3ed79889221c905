"""Render plain data for people as tables: in a terminal for the CLI, as HTML for notebooks."""
