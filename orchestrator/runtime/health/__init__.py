"""State of the server and its fleet: findings for `doctor` and `status`, and waiting until the fleet is ready."""
