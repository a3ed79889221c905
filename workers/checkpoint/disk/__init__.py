"""Bytes between memory and folders: written durably, read verified, deleted in the right order. No torch."""
