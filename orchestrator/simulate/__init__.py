"""The controller in a world that is simulated: the same core, virtual time, and every fault that a seed chooses."""
