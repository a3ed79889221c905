"""Cases of the benchmark: the catalogue, and how each is built with its inputs and reference result."""
