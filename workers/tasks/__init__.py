"""What a rank runs: entry point, a file per task with `main(context) -> dict`, the context of users' functions."""
