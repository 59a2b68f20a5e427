"""The user's own OpenSSH, told what we know of a host."""

from pathlib import Path

from tpuswarm.remote.host import Host


def openssh(host: Host, key: Path, program: str = "ssh") -> list[str]:
    """The beginning of its command line: our key, the host keys that we know and no others, the way there.

    The destination, USER@ADDRESS, and the rest are the caller's.
    """
    words = [program, "-F", "none", "-i", str(key), "-o", f"UserKnownHostsFile={host.known_hosts}"]
    words += ["-o", f"HostKeyAlias={host.alias}", "-o", f"Port={host.port}"]
    if host.proxy:
        words += ["-o", f"ProxyCommand={host.proxy}"]
    for option in (
        "IdentitiesOnly=yes", "GlobalKnownHostsFile=none", "StrictHostKeyChecking=yes", "CheckHostIP=no",
        "PreferredAuthentications=publickey", "ServerAliveInterval=15", "ServerAliveCountMax=3", "ConnectTimeout=20",
    ):  # fmt: skip
        words += ["-o", option]
    return words
