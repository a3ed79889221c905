"""One placement of a job on one node: its folder, its supervisor, its ranks, and how all of them end."""
