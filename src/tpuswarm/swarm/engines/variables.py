"""Names and values that a machine's Ray gets by files and variables; needs no Ray itself."""

import os
import secrets
import shutil
from pathlib import Path

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.atomic import create_atomically

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray must not choose a member's devices
    "RAY_worker_niceness": "0",  # Ray's default of 15 would slow training down
    "RAY_raylet_start_wait_time_s": "60",  # a busy machine needs longer than Ray's 30 s
    "RAY_gcs_server_port_wait_time_s": "60",
    "RAY_worker_register_timeout_seconds": "120",  # 30 s were measured at ten programs for each core; Ray allows 60
}
"""For every process that imports Ray, and every machine's node."""
MEMBER = "tpuswarm-member"
"""Ray's resource of a machine that joined; one member may run there."""
AGGREGATORS = "tpuswarm-aggregators"
"""Ray's resource of a machine that joined and has room for aggregators."""
NAMED = "tpuswarm-name:"
"""Prefix of the resource with such a machine's name."""
DISMISSED = "dismissed.json"
"""File in the folder of a machine's Ray with the reason why the swarm dismissed it."""
COMPILED = "TPUSWARM_COMPILED"
"""Variable with the bucket URL of compiled programs that the machines of a run share."""
BATCH = "TPUSWARM_BATCH"
"""Variable with the rows of a step of a machine that joined, if not the run's."""
MIN_FREE_BYTES = 2**26
"""Room for Ray's sockets and logs."""
MIN_STORE_BYTES = 2**28
"""Minimum size of Ray's object store. Payloads pass through it; larger ones go through the disk."""

CALL_LIMIT = 16
"""Calls that a process executes at a time, without heartbeats."""


def store_bytes(largest: int) -> int:
    """Return the size of Ray's object store, given the largest message in bytes."""
    return max(MIN_STORE_BYTES, 2 * largest)


def use_token(path: Path) -> None:
    """Have Ray sign its calls with the secret in a file, which is created if missing.

    Raise InputError for an empty file.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        create_atomically(path, secrets.token_hex(32))  # another process may be first
    if not path.read_bytes().strip():
        raise InputError(f"{path} is empty; restore the run's file `token`, or delete it: the run draws a new one")
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path.resolve())
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would take precedence


def private_folder() -> Path:
    """Return the folder for Ray's sockets and logs: a short path, for sockets, and private, unlike Ray's own."""
    parent = Path(f"/tmp/tpuswarm-{os.getuid()}")
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.stat().st_uid != os.getuid() or parent.is_symlink():
        raise RunFailed(f"{parent} belongs to another user, and Ray's sockets should lie there; remove it")
    parent.chmod(0o700)
    return parent


def require_room(store: int) -> None:
    """Raise RunFailed if the disk of Ray's folder is too full; Ray would wait for files that it cannot write.

    store: bytes of Ray's object store, which lies in that folder if /dev/shm is too small.
    """
    folder, shared_memory, needed, reason = private_folder(), Path("/dev/shm"), MIN_FREE_BYTES, "sockets and logs"
    if not shared_memory.exists() or shutil.disk_usage(shared_memory).free < store:
        needed, reason = needed + store, f"{reason}, and messages, for which /dev/shm is too small"
    if (free := shutil.disk_usage(folder).free) < needed:
        raise RunFailed(
            f"Ray needs {needed / 2**20:.0f} MiB in {folder} for {reason}, but only {free / 2**20:.0f} MiB are free: "
            "make room on that disk"
        )
