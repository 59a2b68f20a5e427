"""This computer's SSH key; machines get its public half as metadata."""

import getpass
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tpuswarm.errors import InputError
from tpuswarm.train.process.atomic import create_atomically, write_atomically

if TYPE_CHECKING:
    import asyncssh

AGENT_TIMEOUT_S = 10.0


def key_file() -> Path:
    """Return the path of the private half."""
    return Path.home() / ".ssh" / "tpuswarm"


def make_key() -> str:
    """Return the public half, one line; create the halves that are missing. Raise InputError as `find_key`."""
    path = key_file()
    if (key := find_key()) is None:
        import asyncssh

        path.parent.mkdir(mode=0o700, exist_ok=True)
        new = asyncssh.generate_private_key("ssh-ed25519", comment=f"tpuswarm {getpass.getuser()}")
        create_atomically(path, new.export_private_key())
        key = _public_half(path)
        write_atomically(path.with_suffix(".pub"), f"{key}\n")
    return key


def find_key() -> str | None:
    """Return the public half, one line; None: a half is missing. Raise InputError if the key cannot be used."""
    path, stored = key_file(), public_key()
    half = _public_half(path) if path.exists() else ""
    return stored if stored and stored.split()[:2] == half.split()[:2] else None


def public_key() -> str | None:
    """Return the stored public half without checking it against the private one; None: there is none."""
    try:
        return key_file().with_suffix(".pub").read_text(encoding="utf-8").strip() or None
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def read_private(path: Path) -> "asyncssh.SSHKey | None":
    """Return a private key; None: it has a passphrase. Raise InputError if it cannot be read, or is damaged."""
    import asyncssh

    try:
        return asyncssh.read_private_key(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except asyncssh.KeyImportError as error:
        if "passphrase" in str(error).lower():
            return None
        raise InputError(
            f"{path} is not a whole private key: delete it and run the same command again, which makes a new one"
        ) from error


def _public_half(path: Path) -> str:
    import asyncssh

    if private := read_private(path):
        return private.export_public_key().decode().strip()
    with suppress(asyncssh.KeyImportError):  # an encrypted PEM file hides its public half
        public = asyncssh.read_public_key(path).export_public_key().decode().strip()
        if public.split()[1] in _agent_keys():
            return public
    raise InputError(
        f"{path} has a passphrase, and no SSH agent has the key: `ssh-add {path}`, or remove the passphrase with "
        f"`ssh-keygen -p -f {path}`"
    )


def _agent_keys() -> list[str]:
    """Return the words that the SSH agent prints about its keys."""
    with suppress(FileNotFoundError, subprocess.TimeoutExpired):
        return subprocess.run(["ssh-add", "-L"], capture_output=True, text=True, timeout=AGENT_TIMEOUT_S).stdout.split()
    return []
