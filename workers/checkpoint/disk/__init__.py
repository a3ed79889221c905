"""Checkpoint folders on disk: write durably, read verified, describe, and delete in a safe order. No torch."""
