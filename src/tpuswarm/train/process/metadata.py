"""Read Google's metadata server, which describes this machine."""

import http.client
import json
import os
import urllib.request
from pathlib import Path
from typing import NamedTuple

METADATA = "metadata.google.internal"
TIMEOUT_S = 5


class LocalMachine(NamedTuple):
    """This machine, as Google's metadata server describes it."""

    name: str
    """Name of the TPU or of the VM."""
    number: int
    """Number of this host."""
    hosts: tuple[str, ...]
    """Internal addresses of all hosts; at most one for a machine of one host."""


def metadata_host() -> str | None:
    """Return the address of the metadata server; None on a machine that Google did not make.

    GCE_METADATA_HOST names another one, as for Google's own libraries.
    """
    return os.environ.get("GCE_METADATA_HOST") or (METADATA if _made_by_google() else None)


def read_metadata(host: str, name: str) -> str | None:
    """Return a value of this instance; None if there is none. Raise OSError or HTTPException without an answer."""
    url = f"http://{host}/computeMetadata/v1/instance/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode().strip()) or None


def read_local_machine() -> LocalMachine | None:
    """Describe this machine by its metadata server; None if no server answers."""
    host = os.environ.get("GCE_METADATA_HOST") or METADATA

    def read(name: str) -> str | None:
        try:
            return read_metadata(host, name)
        except (OSError, http.client.HTTPException):
            return None

    workers = read("attributes/worker-network-endpoints") or ""
    name = read("attributes/instance-id") or read("name")
    if name is None:
        return None
    addresses = tuple(worker.rpartition(":")[2] for worker in workers.split(",") if worker)
    return LocalMachine(name, int(read("attributes/agent-worker-number") or 0), addresses)


def external_address() -> str | None:
    """Return this VM's external address; None without one, and on a machine that Google did not make."""
    if (host := metadata_host()) is None:
        return None
    try:
        return read_metadata(host, "network-interfaces/0/access-configs/0/external-ip")
    except (OSError, http.client.HTTPException):
        return None


def format_maintenance(answer: str | None) -> str:
    """Format the value of the metadata key upcoming-maintenance; empty if it announces nothing."""
    try:
        found = json.loads(answer or "")
    except ValueError:
        return ""
    notice = {name.replace("_", "").lower(): value for name, value in found.items()} if isinstance(found, dict) else {}
    if "windowstarttime" not in notice:
        return ""
    kind = notice.get("type", notice.get("maintenancetype", "")).lower()
    return f"{kind} maintenance from {notice['windowstarttime']} to {notice.get('windowendtime', '?')}".strip()


def _made_by_google() -> bool:
    try:
        return "Google" in Path("/sys/class/dmi/id/product_name").read_text()
    except OSError:
        return False
