"""Read and check swarm.toml."""
