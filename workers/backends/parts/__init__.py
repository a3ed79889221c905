"""What several vendors' back ends share. Not back ends themselves: those are the files one folder up."""
