"""Check before renting a device whether a model will run on it, by tracing the model, not by a list of names."""
