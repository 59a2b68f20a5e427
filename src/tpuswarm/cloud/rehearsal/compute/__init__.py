"""Compute Engine's REST API v1: VMs, networks, firewall rules, disks, operations."""
