"""What runs the processes of a swarm: `inproc` all under a virtual clock, `threads` those of one node in real time."""
