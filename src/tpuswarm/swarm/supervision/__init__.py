"""Start a run of several members, or join one, and keep it alive."""
