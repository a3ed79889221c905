"""Copy checkpoints between folders, object stores and nodes. Only missing chunks are transferred."""
