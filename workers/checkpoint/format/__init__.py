"""What lies on disk, without torch: the manifest, what it may not say, its JSON trees, names of files and folders."""
