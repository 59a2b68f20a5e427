"""A host as it is reached, and what may go wrong on the way."""

from dataclasses import dataclass
from pathlib import Path

from tpuswarm.errors import RunFailed


@dataclass(frozen=True)
class Host:
    """One worker of a machine."""

    label: str
    """What people call it: node-3/1."""
    address: str
    port: int
    user: str
    alias: str
    """Its name in `known_hosts`: a machine that was created again has another one."""
    keys: tuple[str, ...]
    """Its host keys, a line of an OpenSSH public key each."""
    known_hosts: Path
    """Where those are written down, for OpenSSH and for a person."""
    proxy: str | None = None
    """A command whose standard input and output are the way to it; %h and %p stand for address and port."""
    exports: str = ""
    """What a shell does there before a program of ours begins: the flags of the machine."""


class NoWay(RunFailed):
    """A host cannot be reached, or was lost."""

    def __init__(self, host: Host, why: str):
        super().__init__(f"{host.label} ({host.address}) {why}")
        self.host = host


class HostKeyChanged(NoWay):
    """It shows another key than it wrote down when it was made."""

    def __init__(self, host: Host):
        super().__init__(
            host,
            "shows another host key than the one it had when it was made: it was reinstalled, or somebody stands in "
            f"between. If you know why, `ssh-keygen -R {host.alias} -f {host.known_hosts}` forgets the old key, and "
            "the next command takes the one that the cloud names",
        )


class KeyRefused(NoWay):
    """It does not let us in."""

    def __init__(self, host: Host, key: Path):
        super().__init__(
            host,
            f"does not take the key {key} for user {host.user}: its metadata does not name it (yet; a new machine may "
            "need a minute), or its program that reads the metadata has ended, or OS Login is on there, which takes no "
            "keys from metadata (enable-oslogin; a policy, constraints/compute.requireOsLogin, may force it)",
        )


class Silent(NoWay):
    """It does not answer in time."""

    def __init__(self, host: Host, seconds: float, doing: str = "did not answer"):
        super().__init__(host, f"{doing} within {seconds:g} s")
