"""The way from `provider` and `project` in swarm.toml to a cloud."""

from tpuswarm.cloud.google.access import Access


def open_access(provider: str, project: str | None) -> Access:
    """Access to a project at Google, or at the local cloud, which is started if it does not run.

    At Google nothing is read and nobody asked before the first call; without a project, it is the one of gcloud.
    """
    if provider == "google":
        return Access(project)
    from tpuswarm.cloud.rehearsal.connect import connect

    return Access(project or REHEARSAL_PROJECT, connect())


REHEARSAL_PROJECT = "rehearsal"
"""The local cloud's, where none is named."""
