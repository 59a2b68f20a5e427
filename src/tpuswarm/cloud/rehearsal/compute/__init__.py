"""Compute Engine's REST API v1, as far as a fleet needs it: VMs, networks, firewall rules, disks, operations."""
