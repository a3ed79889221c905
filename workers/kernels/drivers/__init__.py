"""Compilers, drivers and memory that the implementations of kernels use."""
