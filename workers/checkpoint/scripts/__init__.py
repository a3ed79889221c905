"""Checkpoints that scripts write in formats of their own: whether one is whole, and what keeps it from being loaded
elsewhere. Nothing of them is run; they are read by processes with limits (cluster/sandbox.py).
"""
