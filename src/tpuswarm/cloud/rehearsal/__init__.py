"""A local cloud to rehearse on: servers on loopback that speak Google's own protocol to its unmodified clients.

`connect` finds or starts the server, a process of its own with its state in one folder. `wire` takes requests (gRPC and
REST, one set of handlers), `tpu` and the rooms beside it answer them. What happens by itself is in the timetable, what
goes wrong is the weather; every change is on the disk before the answer leaves.
"""
