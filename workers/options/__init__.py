"""Options of back ends and models: configuration, optimisation levels, and which devices to prefer."""
