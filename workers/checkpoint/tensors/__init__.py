"""Live tensors on any device: shards, shared memory, byte ranges, and how stored bytes are filled in."""
