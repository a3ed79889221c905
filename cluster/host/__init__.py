"""What Polyfleet uses of the machine it runs on: processes, ports, locks, secret tokens, log and cache files."""
