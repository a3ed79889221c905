"""Execution libraries below a device: what torch computes with, how to switch it, and the proof that it took effect."""
