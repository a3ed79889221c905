"""Files that users write for simulations: fleets, traces of jobs and rates, read and checked."""
