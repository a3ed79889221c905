"""Checkpoints of others: read without trusting them, written as they want them."""
