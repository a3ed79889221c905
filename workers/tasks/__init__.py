"""What an attempt runs: one file per task, each with `main(context) -> dict`, the task's result as plain data."""
