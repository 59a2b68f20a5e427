"""Which steps a machine needs, in their order."""

from collections.abc import Mapping
from dataclasses import dataclass

from tpuswarm.remote.host import Host
from tpuswarm.remote.places import ENVIRONMENT
from tpuswarm.remote.setup.nfs import nfs
from tpuswarm.remote.setup.notebook import notebook
from tpuswarm.remote.setup.python import environment, python
from tpuswarm.remote.setup.router import client
from tpuswarm.remote.setup.step import Step
from tpuswarm.remote.setup.system import system
from tpuswarm.remote.setup.table import Setup


@dataclass(frozen=True)
class Machine:
    """A host, and what of it decides about its steps."""

    host: Host
    is_server: bool = False
    """Whether it is the one of [setup.nfs]."""
    server: str | None = None
    """The internal address of the one that is, where there is one."""
    has_disk: bool = False
    clients: tuple[str, ...] = ()
    """Of the server, the internal addresses of all others."""
    settings: tuple[tuple[str, str], ...] = ()
    """Of its kernel: names in /proc/sys, and values."""


def steps(table: Setup, machine: Machine, secrets: Mapping[str, str]) -> tuple[Step, ...]:
    """All of a machine's; `secrets` has a value for each name of the table."""
    shared: list[Step] = []
    if table.nfs and (machine.is_server or machine.server):
        shared += nfs(table.nfs, None if machine.is_server else machine.server, machine.clients)
    # What it leaves running must not hold what our own steps talk to us by: set-up would wait for its end.
    as_programs = f"exec 3>&-\n. ~/{ENVIRONMENT}\n"
    own = (
        Step(f"run-{each.name}", as_programs + each.do, as_programs + each.check if each.check else "true")
        for each in table.run
    )
    return (
        *system(table, machine.has_disk),
        *([client(machine.settings)] if machine.settings else []),
        *python(table),
        *environment(table, secrets),
        *(notebook(table.python) if table.notebook else ()),
        *shared,
        *own,
    )
