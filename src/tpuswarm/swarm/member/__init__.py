"""A member of a swarm: its process, its training loop and its arrays."""
