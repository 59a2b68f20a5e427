"""The way from `provider` and `project` in swarm.toml to a cloud."""

from typing import TYPE_CHECKING

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from tpuswarm.cloud.google.access import Access

PROVIDERS = ("google", "rehearsal")


def check_provider(name: str) -> None:
    """Raise InputError for one that there is not."""
    if name not in PROVIDERS:
        raise InputError(f"there is no provider {name!r}; {did_you_mean(name, PROVIDERS)}")


def open_access(provider: str, project: str | None) -> "Access":
    """Access to a project at Google, or at the local cloud, which is started if it does not run.

    At Google nothing is read and nobody asked before the first call; without a project, it is the one of gcloud.
    """
    from tpuswarm.cloud.google.access import Access

    if provider == "google":
        return Access(project)
    from tpuswarm.cloud.rehearsal.connect import connect

    return Access(project or REHEARSAL_PROJECT, connect())


REHEARSAL_PROJECT = "rehearsal"
"""The local cloud's, where none is named."""
