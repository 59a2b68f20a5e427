"""A swarm without its machines: how well it learns on one device (quality), and how it fares in time (cluster).

`cluster` runs the real state machines under a virtual clock, with speeds, links and failures from a file.
"""
