"""The event log: the thread that writes it, repeated requests, the removal of old jobs, and verification."""
