"""Scripts' own checkpoints: check that they are complete, and make them loadable elsewhere.

Nothing in them is executed; they are read by processes with limits (cluster/sandbox.py).
"""
