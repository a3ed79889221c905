"""Tools for measuring one call of a model or a kernel: inputs, state, time, errors, statistics."""
