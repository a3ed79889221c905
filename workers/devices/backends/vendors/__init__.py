"""Back ends: one file per vendor, with a class `Backend`."""
