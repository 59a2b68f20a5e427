"""Run `tpuswarm WORDS…` in the namespaces of process PID: `in_namespaces.py PID WORDS…`."""

import ctypes
import sys
from pathlib import Path

from tpuswarm.cli import main

_, pid, *words = sys.argv
libc = ctypes.CDLL(None, use_errno=True)
with Path(f"/proc/{pid}/ns/net").open() as net, Path(f"/proc/{pid}/ns/mnt").open() as mnt:
    for namespace in (net, mnt):
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
sys.argv = ["tpuswarm", *words]
main()
