"""What a machine's Ray is told by files and variables, and what it is called there: known without Ray itself."""

import os
import secrets
from pathlib import Path

from tpuswarm.errors import RunFailed

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # which devices a member sees is not Ray's to say
    "RAY_worker_niceness": "0",  # training is what the machine is for; Ray's default is 15
    "RAY_raylet_start_wait_time_s": "60",  # a busy machine needs longer than Ray's 30 s
    "RAY_gcs_server_port_wait_time_s": "60",
}
"""Of every process that imports Ray, and of every machine's node."""
MEMBER = "tpuswarm-member"
"""Ray's resource of a machine that joined: one member may live there."""
NAMED = "tpuswarm-name:"
"""How the resource begins that says what such a machine is called."""
DISMISSED = "dismissed.json"
"""The file, in the folder of a machine's Ray, that says why it is wanted no longer."""
COMPILED = "TPUSWARM_COMPILED"
"""The variable with the URL of what machines of one run have compiled, where it lies in a bucket."""
BATCH = "TPUSWARM_BATCH"
"""The variable with the rows of a step of a machine that joined, where they are not the run's."""
STORE_BYTES = 2**28
"""Of Ray's object store, at least: payloads pass through it; what does not fit goes over the disk."""

CALLS = 16
"""From other processes that one carries out at a time, heartbeats apart."""


def store_bytes(largest: int) -> int:
    """Of Ray's object store where the largest thing that is sent at once has so many bytes."""
    return max(STORE_BYTES, 2 * largest)


def use_token(path: Path) -> None:
    """Let Ray's calls be signed with the secret in a file, which is made if it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        part.rename(path)
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path.resolve())
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would win


def private_folder() -> Path:
    """Where Ray keeps its sockets and logs: short, for sockets, and closed to others, for Ray's own modes are not."""
    parent = Path(f"/tmp/tpuswarm-{os.getuid()}")
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.stat().st_uid != os.getuid() or parent.is_symlink():
        raise RunFailed(f"{parent} belongs to another user, and Ray's sockets should lie there; remove it")
    parent.chmod(0o700)
    return parent
