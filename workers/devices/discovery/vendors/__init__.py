"""Devices of each vendor, from drivers and tools, without opening one: a file per vendor, and its helpers."""
