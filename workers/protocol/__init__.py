"""Messages and files that server, agent, supervisor and ranks exchange. Standard library only."""
