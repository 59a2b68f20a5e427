"""Start the local cloud's server, find it, stop it, and send it commands."""

import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.rehearsal.machines.processes import MACHINE_VARIABLE
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.atomic import create_atomically, partial_path
from tpuswarm.train.process.locks import read_lock_holder
from tpuswarm.train.storage.connection import LOCAL_TOKEN

FOLDER_VARIABLE = "TPUSWARM_REHEARSAL"
"""The environment variable that names the cloud's folder."""
START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 60.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores proxies: the server is on loopback."""


class CloudFolder:
    """The folder of a local cloud: its state, machines, objects, token and its server's address."""

    def __init__(self, path: Path):
        self.path = path
        self.state = path / "state.sqlite"
        self.machines = path / "machines"
        self.objects = path / "objects"
        self.stand_ins = path / "bin"
        self.token_file = path / "token"
        self.lock = path / "server.lock"
        self.address = path / "server.json"
        self.log = path / "server.log"

    def make(self) -> None:
        """Make the folder and the token, readable by their owner only."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)
        if not self.token_file.exists():
            create_atomically(self.token_file, f"rehearsal-{secrets.token_urlsafe(32)}")

    def token(self) -> str:
        """Return the token of every request. Raises RunFailed if others may read it."""
        if self.token_file.stat().st_mode & 0o077:
            raise RunFailed(f"{self.token_file} may be read by others; chmod 600 {self.token_file}")
        return self.token_file.read_text().strip()

    def read_address(self) -> dict[str, Any] | None:
        """Return pid, rpc, http and block of the server that was ready last."""
        try:
            address = json.loads(self.address.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return address if isinstance(address, dict) else None

    def write_address(self, **address: Any) -> IO[str]:
        """Write a server's address; the file is locked until the returned one is closed."""
        file = partial_path(self.address).open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(address))
        file.flush()
        partial_path(self.address).replace(self.address)
        return file


def default_folder() -> CloudFolder:
    """Return $TPUSWARM_REHEARSAL, or a folder in this user's state."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = os.environ.get(FOLDER_VARIABLE) or f"{state}/tpuswarm/rehearsal"
    return CloudFolder(Path(path).expanduser().absolute())


def connect(path: Path | None = None) -> Endpoints:
    """Return the addresses of the cloud in a folder (None: the default folder); start it unless it is running.

    Raises RunFailed with its last line if it does not start.
    """
    folder = CloudFolder(path.absolute()) if path else default_folder()
    folder.make()
    if not is_running(folder):
        _start(folder)
    return _endpoints(folder)


def find_running(folder: CloudFolder) -> Endpoints | None:
    """Return the addresses of the folder's cloud, or None if its server is not running."""
    return _endpoints(folder) if is_running(folder) else None


def is_running(folder: CloudFolder) -> bool:
    """Return whether the server that wrote the folder's address is running."""
    return read_lock_holder(folder.address) is not None


def stop(folder: CloudFolder) -> bool:
    """Stop the server of a folder and wait for its end; the state stays. Return whether it was running."""
    address = folder.read_address()
    if address is None or not is_running(folder):
        return False
    with suppress(ProcessLookupError):
        os.kill(address["pid"], signal.SIGTERM)
    with folder.lock.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    return True


def require_running(folder: CloudFolder) -> Endpoints:
    """Return the addresses of the folder's cloud. Raise InputError if its server is not running."""
    endpoints = find_running(folder)
    if endpoints is None:
        raise InputError(f"no local cloud runs in {folder.path}; `tpuswarm rehearsal start` starts it")
    return endpoints


def send_command(folder: CloudFolder, command: str, **body: Any) -> dict[str, Any]:
    """Send a command of `control` and return its answer. Raises InputError if no server runs or it refuses."""
    endpoints = require_running(folder)
    request = urllib.request.Request(
        f"{endpoints.http}/rehearsal/{command}",
        data=json.dumps(body).encode() if command != "status" else None,
        headers={"Authorization": f"Bearer {endpoints.token}", "Content-Type": "application/json"},
    )
    try:
        with OPENER.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        message = json.load(error)["error"]["message"]
        raise (RunFailed if error.code == 500 else InputError)(message) from error
    except urllib.error.URLError as error:
        raise RunFailed(f"the local cloud does not answer ({error.reason}); see {folder.log}") from error


def gcloud_variables(folder: CloudFolder, endpoints: Endpoints) -> dict[str, str]:
    """Return environment variables that make gcloud and tpuswarm use the local cloud."""
    http = endpoints.http
    return {
        "CLOUDSDK_CONFIG": str(folder.path / "gcloud"),  # apart from the one with real credentials
        "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(folder.token_file),
        "CLOUDSDK_CORE_PROJECT": "rehearsal",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{http}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{http}/compute/v1/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{http}/storage/v1/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_SERVICEUSAGE": f"{http}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBILLING": f"{http}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER": f"{http}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_IAM": f"{http}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_IAMCREDENTIALS": f"{http}/",
        "STORAGE_EMULATOR_HOST": http,
        LOCAL_TOKEN: endpoints.token,
    }


def _endpoints(folder: CloudFolder) -> Endpoints:
    address = folder.read_address() or {}
    machine = os.environ.get(MACHINE_VARIABLE)
    token = f"{folder.token()}~{machine}" if machine else folder.token()
    return Endpoints(f"127.0.0.1:{address['rpc']}", f"http://127.0.0.1:{address['http']}", token)


def _start(folder: CloudFolder) -> None:
    import grpc  # noqa: F401  # if it is missing, this command says what to install; the server's log would

    # A server started from a machine of the cloud is no process of that machine.
    environment = {name: value for name, value in os.environ.items() if name != MACHINE_VARIABLE}
    with folder.log.open("a") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "tpuswarm.cloud.rehearsal.server", str(folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
            cwd=folder.path,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_running(folder):
        if process.poll():  # 0: another process has started a server
            with folder.log.open() as log:
                log.seek(log_start)
                lines = log.read().strip().splitlines() or ["its server ended without a message"]
            raise RunFailed(lines[-1].removeprefix("error: "))
        if time.monotonic() > deadline:
            raise RunFailed(f"the local cloud was not ready after {START_TIMEOUT_S:.0f} s; see {folder.log}")
        time.sleep(0.02)
