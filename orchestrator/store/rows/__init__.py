"""Rows of the job store: how records are encoded, cached and written to the table of jobs."""
