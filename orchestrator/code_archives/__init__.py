"""Submitted folders: which of their files are sent, and the zip archives that contain them."""
