"""The controller's thread: it applies messages, stores the events and executes the commands."""
