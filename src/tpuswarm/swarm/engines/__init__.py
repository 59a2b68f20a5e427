"""What carries the processes: `inproc` all under a virtual clock, `threads` those of one node, `ray` over
machines, where each is an `actor`.
"""
