"""Optimisation levels O0 to O3 as lists of passes, and the optimiser that measures each pass."""
