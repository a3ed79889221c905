"""Whether a model will run on a kind of device, before anybody pays for one: by tracing it, not by a list of names."""
