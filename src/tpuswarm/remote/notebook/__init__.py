"""Jupyter on a machine, through its SSH connection: the server, and for a slice a kernel over all its workers.

`kernel.py` and `worker.py` are sent to hosts and need Jupyter's packages there, not tpuswarm.
"""
