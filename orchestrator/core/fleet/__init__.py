"""Nodes of the fleet: which ones exist, which take jobs, which an autoscaler should start, and which are restarted."""
