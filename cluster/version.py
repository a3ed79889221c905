"""Polyfleet's version. Client, server and agents compare it when they connect."""

VERSION = "0.1.0"
