"""This process on this machine: signals, terminal, what JAX is started with, files that are whole; no arrays."""
