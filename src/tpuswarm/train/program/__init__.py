"""Compile programs for devices, and find their cost and their faults."""
