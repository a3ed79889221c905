"""Implementations of the kernels' operations: one file each, with a class `Kernels`."""
