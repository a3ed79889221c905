"""Verbs of the server: each is one typed function, from which its route, its reference and its client follow."""
