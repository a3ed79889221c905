"""Explanations for users: why a job waits, what a changed fleet would do for it, and what it would get if submitted."""
