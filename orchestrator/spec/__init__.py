"""Specifications that users write as text, checked and converted to the types of the core."""
