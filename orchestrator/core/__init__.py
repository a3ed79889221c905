"""What to do next, as pure functions: no I/O, no clock, no randomness that is not an argument."""
