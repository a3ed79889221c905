"""What is done to a caller's model: passes, preparation, memory estimates, and validation."""
