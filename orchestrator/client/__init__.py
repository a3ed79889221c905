"""REST client: connections to the server, file transfers, and start and stop of a fleet."""
