"""Attempts on nodes: status of their parts, silent nodes, stop requests, and how an attempt ends."""
