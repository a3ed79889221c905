"""Reports of benchmark runs: one HTML file to look at, Markdown to paste, JSON and CSV to compute with."""
