"""Where a job could run now or later: the rules for devices, the free capacity, quotas, reservations and scores."""
