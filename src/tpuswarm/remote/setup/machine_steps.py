"""Return the steps that a machine needs, in order."""

from collections.abc import Mapping
from dataclasses import dataclass

from tpuswarm.remote.host import Host
from tpuswarm.remote.paths import ENVIRONMENT
from tpuswarm.remote.setup.python import environment, notebook, python
from tpuswarm.remote.setup.step import Step
from tpuswarm.remote.setup.system import network, nfs, system
from tpuswarm.remote.setup.table import Setup


@dataclass(frozen=True)
class Machine:
    """A host, and facts that decide about its steps."""

    host: Host
    is_server: bool = False
    """It is the server of [setup.nfs]."""
    server: str | None = None
    """The internal address of another server, if any."""
    has_disk: bool = False
    clients: tuple[str, ...] = ()
    """On the server: the internal addresses of all other machines."""
    settings: tuple[tuple[str, str], ...] = ()
    """Kernel settings: names in /proc/sys, and values."""
    pool: str = ""


def steps(table: Setup, machine: Machine, secrets: Mapping[str, str], wheel: str) -> tuple[Step, ...]:
    """Return all steps of a machine. `secrets`: a value for each name in the table; `wheel`: file name of ours."""
    table = table.of(machine.pool)
    shared: tuple[Step, ...] = ()
    if table.nfs and (machine.is_server or machine.server):
        shared = tuple(nfs(table.nfs, None if machine.is_server else machine.server, machine.clients))
    # Close descriptor 3: programs that the step leaves running would keep set-up waiting.
    prefix = f"exec 3>&-\n. ~/{ENVIRONMENT}\n"
    return (
        *system(table, machine.has_disk, table.swap_of(machine.pool)),
        *([network(machine.settings)] if machine.settings else []),
        *python(table, wheel),
        *environment(table, secrets),
        *(notebook(table.python) if table.notebook else ()),
        *shared,
        *(
            Step(f"run-{step.name}", prefix + step.do, prefix + step.check if step.check else "true")
            for step in table.run
        ),
    )
