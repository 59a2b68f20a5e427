"""Decide what a fleet does next: pure functions, without I/O, clocks or threads."""
