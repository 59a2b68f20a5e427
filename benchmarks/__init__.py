"""Benchmarks: each prints tables of figures beside a peer or a limit."""
