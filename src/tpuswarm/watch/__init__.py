"""What machines are at, while they are at it."""
