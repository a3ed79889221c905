"""Devices of a node: discovered without opening them, described, and used through a back end per vendor."""
