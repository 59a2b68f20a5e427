"""Network namespaces: the machines of a network on one machine. They end with the process that made them."""

import ctypes
import os
import subprocess
from pathlib import Path

from benchmarks.report import Skipped

CLONE_NEWNET = 0x4000_0000


class Space:
    """Namespaces, held by a process that ends with this one."""

    def __init__(self, *kinds: str, at_end: str = "") -> None:
        """Create namespaces of the kinds of unshare(1). Raises Skipped if that is not allowed.

        at_end: a script that runs there once this process has closed the space or has been killed.
        """
        self._has_end = bool(at_end)
        holder = f"trap '' HUP INT QUIT TERM; echo; cat; {at_end}" if at_end else "echo; exec cat"
        self._holder = subprocess.Popen(
            ["unshare", *kinds, "sh", "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            self.close()
            raise Skipped(f"this machine does not allow namespaces (unshare {' '.join(kinds)})")
        self.pid = self._holder.pid
        self.enter = ["nsenter", "-t", str(self.pid), *kinds]
        """The prefix of a command that runs there."""

    def join(self) -> None:
        """Move this thread into the network; its new sockets stay there."""
        with Path(f"/proc/{self.pid}/ns/net").open() as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def sh(self, script: str, text: str | None = None, **environment: str) -> str:
        """Run a script there and return its output. Raises RuntimeError with its stderr if it fails."""
        done = subprocess.run(
            [*self.enter, "sh", "-ec", script], input=text, env={**os.environ, **environment},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{script}\n{done.stderr}")
        return done.stdout

    def close(self) -> None:
        """End the holder, and with it the namespaces."""
        if not self._has_end:
            self._holder.kill()
        self._holder.communicate()
