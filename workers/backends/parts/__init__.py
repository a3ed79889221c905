"""Code that several vendors' backends share. The backends themselves are the files one folder up."""
