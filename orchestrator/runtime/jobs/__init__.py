"""The jobs of the server: open jobs in memory, finished jobs in the store, and the removal of old ones."""
