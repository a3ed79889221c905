"""Hosts reached over SSH: inspect them, copy code, install environments, and join or leave the fleet."""
