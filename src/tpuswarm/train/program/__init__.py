"""Compile programs for devices, and find their cost and their faults.

Each file is one piece of mathematics or one measured choice, so the room stays long: sharding, attention, FLOPs, sums.
"""
