"""Facts about devices without opening one: documented, cached from probes, and the inventory of a machine."""
