"""Estimate how much memory a model needs before any is allocated: by tracing the module, or by formulas."""
