"""What the controller stores, receives and sends: its state, messages, commands, and the names of its crash points."""
