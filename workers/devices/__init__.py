"""Devices of a node: found without opening them, described, and used through a back end per vendor."""
