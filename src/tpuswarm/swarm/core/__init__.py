"""The pure heart of a swarm: values, arithmetic and decisions; no I/O, no clock, no threads, only NumPy and JAX."""
