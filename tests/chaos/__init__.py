"""A package, so that its fleet ends with it, as in end_to_end."""
