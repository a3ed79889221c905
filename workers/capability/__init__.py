"""Capabilities of a kind of device: documented facts with sources, corrected by probes on the device itself."""
