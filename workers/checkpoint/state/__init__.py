"""Live objects: taken apart into named tensors and values, and filled again without a copy of their size."""
