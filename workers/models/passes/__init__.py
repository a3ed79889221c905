"""Optimisation passes: each changes a model, or gives the reason why it does not apply."""
