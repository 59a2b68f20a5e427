"""Network namespaces that vanish with the process that made them: the machines of a network, on one machine."""

import ctypes
import os
import subprocess
from pathlib import Path

from benchmarks.report import Skipped

CLONE_NEWNET = 0x4000_0000


class Space:
    """Namespaces, held by a process that ends when this one does."""

    def __init__(self, *kinds: str) -> None:
        """New ones, of the kinds that unshare(1) names. Raises Skipped where that is not allowed."""
        self._holder = subprocess.Popen(
            ["unshare", *kinds, "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            self.close()
            raise Skipped(f"this machine does not allow namespaces (unshare {' '.join(kinds)})")
        self.pid = self._holder.pid
        self.enter = ["nsenter", "-t", str(self.pid), *kinds]
        """The beginning of a command that is to run there."""

    def join(self) -> None:
        """Take this thread into its network for good; the sockets that it makes stay there."""
        with Path(f"/proc/{self.pid}/ns/net").open() as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def sh(self, script: str, text: str | None = None, **environment: str) -> str:
        """What a script prints there. Raises RuntimeError, with what it says on stderr, if it fails."""
        done = subprocess.run(
            [*self.enter, "sh", "-ec", script], input=text, env={**os.environ, **environment},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{script}\n{done.stderr}")
        return done.stdout

    def close(self) -> None:
        """End the holder, and with it the namespaces."""
        self._holder.kill()
        self._holder.communicate()
