"""Sends a folder to many machines at once: what git tracks or does not ignore, and of that only what they lack."""
