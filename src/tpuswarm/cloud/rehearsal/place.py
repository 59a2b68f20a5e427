"""Where a local cloud lives: one folder, with its state, its machines, its token and its server's address."""

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from tpuswarm.errors import RunFailed
from tpuswarm.train.process.atomic import write_atomically

VARIABLE = "TPUSWARM_REHEARSAL"
"""The environment variable that names the folder."""


class Place:
    """The folder of a cloud."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.state = folder / "state.sqlite"
        self.machines = folder / "machines"
        self.objects = folder / "objects"
        self.stand_ins = folder / "bin"
        self.token_file = folder / "token"
        self.lock = folder / "server.lock"
        self.address = folder / "server.json"
        self.log = folder / "server.log"

    def make(self) -> None:
        """The folder, for its owner alone, and the token."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        if not self.token_file.exists():
            new = self.token_file.with_suffix(f".{secrets.token_hex(8)}")
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"rehearsal-{secrets.token_urlsafe(32)}")
            with suppress(FileExistsError):  # the first one to come stays
                os.link(new, self.token_file)
            new.unlink()

    def token(self) -> str:
        """What every request carries. Raises RunFailed if others may read it."""
        if self.token_file.stat().st_mode & 0o077:
            raise RunFailed(f"{self.token_file} may be read by others; chmod 600 {self.token_file}")
        return self.token_file.read_text().strip()

    def read_address(self) -> dict[str, Any] | None:
        """What the server wrote when it was ready last time: pid, rpc, http, block."""
        try:
            found = json.loads(self.address.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write_address(self, **address: Any) -> None:
        """That the server is ready, and where."""
        write_atomically(self.address, json.dumps(address))


def default_place() -> Place:
    """$TPUSWARM_REHEARSAL, or a folder of this user's state."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = os.environ.get(VARIABLE) or f"{state}/tpuswarm/rehearsal"
    return Place(Path(folder).expanduser().absolute())
