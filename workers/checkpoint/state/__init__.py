"""Flatten live objects into named tensors and values, and fill them again in place."""
