"""The plan: which waiting jobs start, which running ones stop or move, and why the others wait."""
