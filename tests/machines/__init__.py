"""A package, so that its machines end with it, as in end_to_end."""
