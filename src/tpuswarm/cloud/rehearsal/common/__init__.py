"""Records, clock, faults, hosts and errors, shared by all APIs of the local cloud."""
