"""Open the cloud that `provider` and `project` in swarm.toml name."""

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from tpuswarm.cloud.google.access import Access

PROVIDERS = ("google", "rehearsal")
REHEARSAL_PROJECT = "rehearsal"


def check_provider(name: str) -> None:
    if name not in PROVIDERS:
        raise InputError(f"there is no provider {name!r}; {did_you_mean(name, PROVIDERS)}")


def open_access(provider: str, project: str | None) -> "Access":
    """Open a project at Google (by default gcloud's), or at the local cloud, which is started if necessary.

    Contacts Google only at the first call.
    """
    from tpuswarm.cloud.google.access import Access

    if provider == "google":
        return Access(project)
    from tpuswarm.cloud.rehearsal.connect import connect

    return Access(project or REHEARSAL_PROJECT, connect())


def use_rehearsed_buckets(file: Path = Path("swarm.toml")) -> None:
    """Make gs:// mean the local cloud in this process if `file` is a rehearsal's."""
    if "STORAGE_EMULATOR_HOST" in os.environ:
        return
    try:
        provider = tomllib.loads(file.read_text(encoding="utf-8-sig")).get("provider")
    except (OSError, ValueError):
        return
    if provider != "rehearsal":
        return
    from tpuswarm.train.storage.connection import Endpoint, use_local_cloud

    access = open_access("rehearsal", None)
    assert access.endpoints is not None
    use_local_cloud(Endpoint(access.endpoints.http, access.credentials))
