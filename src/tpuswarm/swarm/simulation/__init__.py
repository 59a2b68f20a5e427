"""Simulate a swarm's timing: the real state machines under a virtual clock, with speeds, links and failures."""
