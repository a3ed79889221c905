"""Attempts on nodes: reports of their parts, silent nodes, stop requests, and how an attempt ends."""
