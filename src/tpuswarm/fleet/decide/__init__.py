"""Decide a fleet's next actions: pure functions, without I/O, clocks or threads."""
