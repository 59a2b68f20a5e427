"""Benchmarks: each prints a table beside a peer or a limit, and the machine; nothing here is a timed test."""
