"""Choosing a back end: by name, by what is here, by how good it is, by how much memory is free."""
