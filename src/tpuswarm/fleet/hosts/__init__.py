"""Reach the machines of a fleet over SSH, and set them up."""
