"""The agent of a node, with its remote calls, and the start of the nodes of a host."""
