"""A host that SSH reaches, its OpenSSH command line, and the errors of a connection to it."""

from dataclasses import dataclass
from pathlib import Path

from tpuswarm.errors import RunFailed

OPENSSH_OPTIONS = (
    "IdentitiesOnly=yes", "GlobalKnownHostsFile=none", "StrictHostKeyChecking=yes", "CheckHostIP=no",
    "PreferredAuthentications=publickey", "ServerAliveInterval=15", "ServerAliveCountMax=3", "ConnectTimeout=20",
)  # fmt: skip


@dataclass(frozen=True)
class Host:
    """One worker of a machine."""

    label: str
    """Its name for people, such as node-3/1."""
    address: str
    port: int
    user: str
    alias: str
    """Its name in `known_hosts`; a machine that is created again gets another one."""
    keys: tuple[str, ...]
    """Its host keys, each a line of an OpenSSH public key."""
    known_hosts: Path
    proxy: str | None = None
    """A command whose standard input and output connect to the host; %h and %p stand for address and port."""
    exports: str = ""
    """Shell code that exports the machine's flags, and the number of a slice's worker."""


def openssh_command(host: Host, key: Path) -> list[str]:
    """Return the words of `ssh` up to the destination: our key, the host's known keys, its port and proxy."""
    options = [f"UserKnownHostsFile={host.known_hosts}", f"HostKeyAlias={host.alias}", f"Port={host.port}"]
    if host.proxy:
        options.append(f"ProxyCommand={host.proxy}")
    words = ["ssh", "-F", "none", "-i", str(key)]
    for option in (*options, *OPENSSH_OPTIONS):
        words += ["-o", option]
    return words


class HostUnreachable(RunFailed):
    """A host cannot be reached, or its connection was lost."""

    def __init__(self, host: Host, why: str):
        super().__init__(f"{host.label} ({host.address}) {why}")
        self.host = host


class HostKeyChanged(HostUnreachable):
    """The host shows another key than it published when it was created."""

    def __init__(self, host: Host):
        super().__init__(
            host,
            "shows another host key than when it was created: it was reinstalled, or somebody intercepts the "
            f"connection. If you know why, forget the old key with `ssh-keygen -R {host.alias} -f {host.known_hosts}`; "
            "the next command takes the key that the cloud names",
        )


class KeyRefused(HostUnreachable):
    """The host refuses our key."""

    def __init__(self, host: Host, key: Path):
        super().__init__(
            host,
            f"does not take the key {key} for user {host.user}. A new machine may need a minute to read its metadata. "
            "Otherwise its guest agent has stopped, or it uses OS Login, which ignores keys in metadata "
            "(enable-oslogin; the policy constraints/compute.requireOsLogin may force it)",
        )


class HostTimeout(HostUnreachable):
    """The host takes too long."""

    def __init__(self, host: Host, seconds: float, problem: str = "did not answer"):
        super().__init__(host, f"{problem} within {seconds:g} s")
