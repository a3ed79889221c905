"""Facts about one job: its state from the event log, its progress, the time it still needs, what follows a failure."""
