"""Watch machines and runs while they work."""
