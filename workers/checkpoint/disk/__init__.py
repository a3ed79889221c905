"""Checkpoint files: write them durably, read them verified, delete them in a safe order. No torch."""
