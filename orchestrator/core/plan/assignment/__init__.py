"""Which option each job of a tier runs as, decided on arrays for all jobs together (docs/decisions/0020)."""
