"""Run one program over several hosts: connect them, notice deaths, decide alike.

JAX alone ends with a stack trace, or hangs, when a host dies; most lines here find out which host died.
"""
