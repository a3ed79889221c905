"""The format on disk, without torch: manifest, checks, JSON trees, names of files and folders."""
