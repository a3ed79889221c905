"""What a node does: discovery, back ends, checkpoints, tasks, and the supervision of attempts.

Importing it imports no torch.
"""
