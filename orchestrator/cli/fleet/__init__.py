"""Commands for the fleet, its hosts, nodes and server."""
