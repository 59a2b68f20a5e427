"""This computer's SSH key; machines get its public half as metadata."""

import getpass
import os
from pathlib import Path


def key_file() -> Path:
    """Return the path of the private half."""
    return Path.home() / ".ssh" / "tpuswarm"


def make_key() -> None:
    """Make the key, readable by its owner only, unless it exists."""
    import asyncssh

    path = key_file()
    public = path.with_suffix(".pub")
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        key = asyncssh.generate_private_key("ssh-ed25519", comment=f"tpuswarm {getpass.getuser()}")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(key.export_private_key())
    if not public.exists():
        public.write_bytes(asyncssh.read_private_key(path).export_public_key())


def public_key() -> str | None:
    """Return the public half, one line; None: there is no key."""
    try:
        return key_file().with_suffix(".pub").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
