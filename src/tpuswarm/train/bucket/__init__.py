"""A run in a bucket: the copy that a process works on, the lease that says who may, and the pieces that are sent."""
