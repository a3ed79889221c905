"""Ray nodes of a fleet on this machine: start, join, repair and stop them. No other folder of cluster/ imports Ray."""
