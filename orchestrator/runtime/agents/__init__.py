"""Agents on the nodes, and the calls into Ray about nodes, agents and reservations."""
