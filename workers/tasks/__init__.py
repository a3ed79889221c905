"""Tasks that an attempt runs: one file per task, each with `main(context) -> dict`, the result as plain data."""
