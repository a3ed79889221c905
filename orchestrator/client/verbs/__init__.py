"""The server's verbs as methods, a class for each noun; written by docs/generate.py."""
