"""Write the OpenSSH configuration that names every machine, and update it as machines come and go."""

import sys
from collections.abc import Mapping
from pathlib import Path

from tpuswarm.fleet.store.fleets import Fleet
from tpuswarm.train.process.atomic import write_atomically


def config_file(fleet: Fleet) -> Path:
    """The user's own configuration includes all files of this folder."""
    return Path.home() / ".ssh" / "tpuswarm.d" / f"{fleet.name}.config"


def host_alias(host: str) -> str:
    """Return a name without a slash, which some programs take for a folder: node-1.0 for node-1/0."""
    return host.replace("/", ".")


def known_hosts_file(fleet: Fleet, label: str) -> Path:
    """The keys of one host, written anew for each connection."""
    return fleet.folder / "known" / host_alias(label)


def render_config(fleet: Fleet, key: Path, users: Mapping[str, str]) -> str:
    """Return the configuration of all hosts (`users` by label); a proxy finds the address at each connection."""
    program = f'"{sys.executable}" -m tpuswarm.fleet.hosts.ssh_proxy "{fleet.folder}"'
    lines = [f"# Hosts of {fleet.name}, written by `tpuswarm ssh-config`, and again when machines come and go."]
    for label, user in users.items():
        machine, _, worker = label.partition("/")
        names = [label, host_alias(label), *([machine] if worker == "0" else [])]
        lines += [
            f"Host {' '.join(names)}",
            f"  User {user}",
            f"  HostName {host_alias(label)}",
            f"  ProxyCommand {program} {label}",
            f'  UserKnownHostsFile "{known_hosts_file(fleet, label)}"',
            f"  HostKeyAlias {host_alias(label)}",
            f'  IdentityFile "{key}"',
            "  IdentitiesOnly yes",
            "  StrictHostKeyChecking yes",
            "  CheckHostIP no",
            "  ServerAliveInterval 15",
            "  ServerAliveCountMax 3",
        ]
    return "\n".join(lines) + "\n"


def refresh_config(fleet: Fleet, key: Path, users: Mapping[str, str]) -> None:
    file = config_file(fleet)
    if file.exists() and (text := render_config(fleet, key, users)) != file.read_text(encoding="utf-8"):
        write_atomically(file, text, is_shared=True)
