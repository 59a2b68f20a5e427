"""This process: signals, terminal, JAX settings, atomic files.

A third of it is about signals; each rule there prevents a crash or a lost Ctrl-C that a test shows.
"""
