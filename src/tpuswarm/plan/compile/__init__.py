"""Compile a recipe for a TPU that is not there, each request in a process of its own; cache what the compiler says."""
