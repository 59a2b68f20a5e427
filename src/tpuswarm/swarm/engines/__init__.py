"""Engines that run the processes: `inproc` all under a virtual clock, `threads` one node, `ray` actors on machines."""
