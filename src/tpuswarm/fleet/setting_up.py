"""Sets up the machines of a fleet: which they are, what they get, and what this computer keeps for later ones."""

import asyncio
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.fleet.core.desired import Desired
from tpuswarm.fleet.core.names import ALL
from tpuswarm.fleet.keeping.fleets import Fleet
from tpuswarm.fleet.reach import Found, Reach, find_targets
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.copy import put
from tpuswarm.remote.host import Host
from tpuswarm.remote.setup.bundle import bundle
from tpuswarm.remote.setup.plan import Machine, steps
from tpuswarm.remote.setup.python import BUNDLE
from tpuswarm.remote.setup.run import Outcome, Told, set_up
from tpuswarm.remote.setup.secrets import Secrets
from tpuswarm.remote.setup.table import Setup
from tpuswarm.remote.sync.send import send
from tpuswarm.train.files import write_atomically
from tpuswarm.train.platform import cache_folder

AGAIN_S = 30.0
"""Seconds before a machine that could not be prepared is prepared again."""


class Kept:
    """What this computer keeps of a fleet's set-up, for machines that come later."""

    def __init__(self, fleet: Fleet):
        self._table, self._versions = fleet.folder / "setup.json", fleet.folder / "versions.json"
        self.secrets = Secrets(fleet.folder / "secrets.json")

    def table(self) -> Setup | None:
        """[setup] as it was used last; None: there was none."""
        try:
            return Setup.model_validate_json(self._table.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def keep(self, table: Setup | None) -> None:
        """What is set up from now on."""
        if table is None:
            self._table.unlink(missing_ok=True)
            return
        self._table.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._table, table.whole().model_dump_json())

    def versions(self, of: str) -> str:
        """Those that the machines have of a list of packages, which is known by its stamp; empty: none has them yet."""
        try:
            found = json.loads(self._versions.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return ""
        return str(found["versions"]) if found["of"] == of else ""

    def keep_versions(self, of: str, versions: str) -> None:
        """What all machines have from now on."""
        if versions:
            write_atomically(self._versions, json.dumps({"of": of, "versions": versions}))


@dataclass(frozen=True)
class Meant:
    """The machines to be set up, and which are meant too and away."""

    machines: tuple[Machine, ...]
    away: tuple[str, ...] = field(default=())


def meant(reach: Reach, table: Setup, where: str = ALL) -> Meant:
    """The hosts of `where`, with what decides about their steps. Raises InputError."""
    seen = reach.look()
    desired = seen.document.desired
    found: Found = find_targets(where, desired, seen.listing.machines)
    server = None
    if table.nfs:
        of = (each for each in seen.listing.machines if each.fleet == desired.fleet and each.pool == table.nfs.server)
        server = next(
            (each for each in of if each.state == "ready" and each.workers and each.workers[0].internal), None
        )
        if server is None:
            raise InputError(f"{table.nfs.server}, the server of [setup.nfs], is not ready: `tpuswarm list` shows why")
    disks = _with_disks(desired)
    machines = tuple(
        Machine(
            host,
            server is not None and to.machine.name == server.name,
            None if server is None or to.machine.name == server.name else server.workers[0].internal,
            to.machine.pool in disks,
        )
        for host, to in zip(reach.ways(seen, found.targets), found.targets, strict=True)
    )
    return Meant(machines, found.away)


def _with_disks(desired: Desired) -> set[str]:
    return {each.name for each in desired.pools if getattr(each.spec, "disks", ())}


async def set_up_all(
    reach: Reach, table: Setup, machines: Iterable[Machine], told: Told = lambda host, step, what: None
) -> Outcome:
    """Set these machines up. Raises InputError for a secret that is nowhere, naming it."""
    kept, table = Kept(reach.fleet), table.whole()
    secrets = kept.secrets.gather(table.secrets, os.environ)
    kept.keep(table)
    wanted = {each.host: steps(table, each, secrets) for each in machines}
    of = next(each.stamp for each in next(iter(wanted.values())) if each.settles)

    async def send_python(connections: Connections, host: Host) -> None:
        await put(connections, host, bundle(table.python, cache_folder("machines")), BUNDLE)

    async with Connections(reach.key) as connections:
        outcome = await set_up(connections, wanted, told, kept.versions(of), send_python)
    kept.keep_versions(of, outcome.settled)
    return outcome


async def prepare(reach: Reach, where: str) -> dict[str, TpuswarmError]:
    """All that a machine needs before anything runs on it: the folder that was synced last, then set-up.

    For machines that come back, without a person: what went wrong, by the label of the host. A secret that is lost is
    an InputError that names it.
    """
    failed: dict[str, TpuswarmError] = {}
    tree, table = reach.fleet.tree.load(), Kept(reach.fleet).table()
    if tree is not None:
        hosts, _ = await asyncio.to_thread(reach.hosts, where)
        async with Connections(reach.key) as connections:
            sent = await send(connections, hosts, tree, reach.fleet.tree)
        failed |= {host.label: error for host, error in sent.failed.items()}
    if table is not None:
        found = await asyncio.to_thread(meant, reach, table, where)
        machines = [each for each in found.machines if each.host.label not in failed]
        if machines:
            outcome = await set_up_all(reach, table, machines)
            failed |= {host.label: error for host, error in outcome.failed.items()}
    return failed


class Beginning(NamedTuple):
    """When something is about to begin on a machine: a reboot, or another machine of the name, is another one."""

    created: float
    """When the machine was created."""
    runs: int
    """How many runs have begun on it before."""


class Preparing:
    """Prepares machines beside whoever carries jobs out. To be used in one event loop."""

    def __init__(self, reach: Reach):
        self._reach = reach
        self._tasks: dict[str, tuple[Beginning, asyncio.Task[dict[str, TpuswarmError]]]] = {}
        self._failed: dict[str, tuple[float, str]] = {}

    def look(self, machines: Mapping[str, Beginning]) -> dict[str, str]:
        """Which of these are not prepared yet, and why; begins what has to be done."""
        if Kept(self._reach.fleet).table() is None and self._reach.fleet.tree.load() is None:
            return {}
        found = {}
        for name, begins in machines.items():
            before, task = self._tasks.get(name, (None, None))
            again, why = self._failed.get(name, (0.0, ""))
            if task is None or before != begins or (why and task.done() and time.monotonic() > again):
                task = asyncio.ensure_future(prepare(self._reach, name))
                self._tasks[name] = (begins, task)
            if not task.done():
                found[name] = why or f"{name} is being set up"
            elif said := _why(task):
                if said != why or time.monotonic() > again:
                    self._failed[name] = (time.monotonic() + AGAIN_S, said)
                found[name] = said
            else:
                self._failed.pop(name, None)
        return found


def _why(task: "asyncio.Task[dict[str, TpuswarmError]]") -> str:
    """Why a machine could not be prepared; empty: it was."""
    error = task.exception()
    if error is None:
        return "; ".join(str(each) for each in task.result().values())
    if not isinstance(error, TpuswarmError):
        raise error
    return str(error)
