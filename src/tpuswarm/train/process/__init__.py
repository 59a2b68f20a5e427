"""This process: signals, terminal, JAX settings, atomic files."""
