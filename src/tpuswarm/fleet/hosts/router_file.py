"""What a router of a fleet forwards: a port for SSH on each worker of each machine that is ready."""

import json
from collections.abc import Iterable
from pathlib import PurePath

from tpuswarm.cloud.protocol import Machine, VmSpec
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.names import by_number
from tpuswarm.router.file import RouterFile, Single
from tpuswarm.router.settings import ends

FIRST_PORT, SSH_PORT = 22_000, 22
INTERFACE = "ens4"
"""What Google's images for VMs call their only one."""
ANY_SOURCE = "0.0.0.0/0"
"""Who may come in is for the network's firewall to say."""


def router_file(desired: Desired, machines: Iterable[Machine]) -> tuple[RouterFile, dict[int, str]]:
    """The file, and what each port leads to, in the order of names. Raises InputError where nothing is ready."""
    vms = {each.name for each in desired.pools if isinstance(each.spec, VmSpec)}
    ours = [each for each in machines if each.fleet == desired.fleet and each.state == "ready" and each.pool not in vms]
    workers = [
        (f"{each.name}/{number}", worker.internal)
        for each in sorted(ours, key=lambda each: by_number(each.name))
        for number, worker in enumerate(each.workers)
        if worker.internal
    ]
    if not workers:
        raise InputError("no TPU of the fleet is ready, so a router has nothing to lead to: `tpuswarm list` shows why")
    ports = dict(enumerate(workers, FIRST_PORT))
    targets = tuple(Single(port=port, to=f"{_routable(address)}:{SSH_PORT}") for port, (_, address) in ports.items())
    file = RouterFile(outside=INTERFACE, inside=INTERFACE, sources=(ANY_SOURCE,), targets=targets)
    return file, {port: label for port, (label, _) in ports.items()}


def _routable(address: str) -> str:
    """As it is; of a machine of the local cloud, which has one of this computer's own, another one like it.

    Nothing is forwarded there: the rules of a rehearsal are worked out and never loaded.
    """
    return f"10.{address.removeprefix('127.')}" if address.startswith("127.") else address


def router_toml(file: RouterFile, labels: dict[int, str]) -> str:
    """The file as `tpuswarm router` reads it, with what each port leads to."""
    lines = [f'outside = "{file.outside}"', f'inside = "{file.inside}"']
    lines.append(f"sources = {json.dumps(file.sources)}")
    for each in file.targets:
        lines += ["", "[[targets]]", f"port = {each.port}  # {labels[each.port]}", f'to = "{each.to}"']
    return "\n".join(lines) + "\n"


def router_pools(desired: Desired) -> list[str]:
    """The pools of the VMs that route."""
    return [each.name for each in desired.pools if each.routes]


def client_settings(desired: Desired) -> tuple[tuple[str, str], ...]:
    """What a TPU's kernel gets from set-up where the fleet has a router, as `sysctl` names it; else nothing."""
    if not router_pools(desired):
        return ()
    return tuple((".".join(PurePath(each.path).relative_to("/proc/sys").parts), each.value) for each in ends())
