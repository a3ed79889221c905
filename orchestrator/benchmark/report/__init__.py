"""Reports of benchmark runs: an HTML file to read, Markdown to paste, CSV to compute with."""
