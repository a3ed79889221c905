"""Submission of jobs and benchmark runs from this machine, with their folders, data and variables."""
