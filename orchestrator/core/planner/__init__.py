"""Which jobs run on which devices, decided for all of them together on arrays; pure. See docs/decisions/0020."""
