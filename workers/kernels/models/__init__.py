"""Kernels in the modules of a model: recognised by trying, swapped one by one, and taken out with the same bits."""
