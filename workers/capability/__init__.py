"""What a kind of device can do: documented facts with their sources, corrected by probes on the device itself."""
