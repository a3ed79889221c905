"""Import and export checkpoints in other formats. Imported files are untrusted; exports follow each format's rules."""
