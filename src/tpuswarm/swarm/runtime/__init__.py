"""A swarm on real machines: what a run was asked to be, its processes, and the supervisor that keeps them alive."""
