"""Sets up the machines of a fleet: which they are, what they get, and what this computer keeps for later ones."""

import asyncio
import json
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.names import ALL
from tpuswarm.fleet.hosts.router_file import client_settings
from tpuswarm.fleet.hosts.routes import Routes
from tpuswarm.fleet.hosts.targets import Selection, find_targets
from tpuswarm.fleet.store.fleets import Fleet
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.copy import put
from tpuswarm.remote.host import Host
from tpuswarm.remote.setup.bundle import bundle
from tpuswarm.remote.setup.notebook import notebook
from tpuswarm.remote.setup.plan import Machine, steps
from tpuswarm.remote.setup.python import BUNDLE
from tpuswarm.remote.setup.run import Outcome, Send, Told, set_up
from tpuswarm.remote.setup.secrets import Secrets
from tpuswarm.remote.setup.step import LIMIT_S, Step
from tpuswarm.remote.setup.table import Setup
from tpuswarm.remote.sync.send import send
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.platform import cache_folder

RETRY_S = 30.0
"""Seconds before a machine that could not be prepared is prepared again."""
MAX_FAILURES = 2
"""Failures after which a machine is a bad one, where others are not."""
HANG_GRACE_S = 300.0
"""Seconds that a machine which is being prepared may stand still beyond the limit of a step, which it watches over
itself: it then hangs, is paid for, and its job waits."""

NO_TABLE = "null"
"""In the table's file: the fleet has no [setup]."""


class SavedSetup:
    """What this computer keeps of a fleet's set-up, for machines that come later."""

    def __init__(self, fleet: Fleet):
        self._table, self._versions = fleet.folder / "setup.json", fleet.folder / "versions.json"
        self.secrets = Secrets(fleet.folder / "secrets.json")

    def table(self) -> Setup | None:
        """[setup] as it was used last; None: there was none."""
        try:
            text = self._table.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return None if text == NO_TABLE else Setup.model_validate_json(text)

    def keep(self, table: Setup | None) -> None:
        """What is set up from now on. That it is nothing is kept too: a keeper elsewhere may know an older table."""
        self._table.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._table, NO_TABLE if table is None else table.whole().model_dump_json())

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
class SetupTargets:
    """The machines to be set up, and which are meant too and away."""

    machines: tuple[Machine, ...]
    away: tuple[str, ...] = field(default=())


def find_setup_targets(routes: Routes, table: Setup, where: str = ALL) -> SetupTargets:
    """The hosts of `where`, with what decides about their steps; the server of [setup.nfs] too, which lets them in.

    Raises InputError.
    """
    seen = routes.snapshot()
    desired = seen.document.desired
    found: Selection = find_targets(where, desired, seen.listing)
    targets, server, clients = found.targets, None, tuple[str, ...]()
    if table.nfs:
        every = find_targets(ALL, desired, seen.listing).targets
        server = next((each for each in every if each.machine.pool == table.nfs.server), None)
        if server is None:
            raise InputError(f"{table.nfs.server}, the server of [setup.nfs], is not ready: `tpuswarm list` shows why")
        clients = tuple(sorted(each.internal for each in every if each != server))
        targets += () if server in targets else (server,)
    disks = _with_disks(desired)
    machines = tuple(
        Machine(
            host,
            to == server,
            None if server is None or to == server else server.internal,
            to.machine.pool in disks,
            clients if to == server else (),
            client_settings(desired) if to.machine.kind == "tpu" else (),
        )
        for host, to in zip(routes.route_to(seen, targets), targets, strict=True)
    )
    return SetupTargets(machines, found.away)


def _with_disks(desired: Desired) -> set[str]:
    return {each.name for each in desired.pools if getattr(each.spec, "disks", ())}


async def set_up_all(
    routes: Routes,
    table: Setup,
    machines: Iterable[Machine],
    told: Told = lambda host, step, what: None,
    environment: Mapping[str, str] = os.environ,
    limit_s: float = LIMIT_S,
) -> Outcome:
    """Set these machines up. Raises InputError for a secret that is nowhere, naming it.

    environment: of whoever gives the command; values of secrets that are not in it are those that are kept.
    limit_s: for each step.
    """
    kept, table = SavedSetup(routes.fleet), table.whole()
    secrets = kept.secrets.gather(table.secrets, environment)
    kept.keep(table)
    wanted = {each.host: steps(table, each, secrets) for each in machines}
    of = next(each.stamp for each in next(iter(wanted.values())) if each.settles)

    async with Connections(routes.key) as connections:
        outcome = await set_up(connections, wanted, told, kept.versions(of), _sender(table.python), limit_s)
    kept.keep_versions(of, outcome.settled)
    return outcome


async def install_notebook(routes: Routes, hosts: Iterable[Host], told: Told) -> Outcome:
    """What a notebook needs, on these hosts alone; nothing of it is kept for others."""
    table = SavedSetup(routes.fleet).table() or Setup()
    async with Connections(routes.key) as connections:
        steps_of = dict.fromkeys(hosts, notebook(table.python))
        return await set_up(connections, steps_of, told, send=_sender(table.python))


def _sender(python: str) -> Send:
    """What sends uv and a Python to a host that can download neither."""

    async def send_python(connections: Connections, host: Host, step: Step) -> str:
        made = await asyncio.to_thread(bundle, python, cache_folder("machines"))
        await put(connections, host, made, BUNDLE)
        return "uv and Python"

    return send_python


class PrepareResult(NamedTuple):
    """What came of preparing a machine."""

    failed: Mapping[str, TpuswarmError]
    """By the label of the host."""
    left: tuple[str, ...] = ()
    """Files of the synced folder that were changed on a host, and stay as they are there."""


async def prepare_machine(routes: Routes, where: str, limit_s: float = LIMIT_S) -> PrepareResult:
    """All that a machine needs before anything runs on it: the folder that was synced last, then set-up.

    For machines that come back, without a person: nothing that was changed on a host is overwritten, and a step that is
    not done within `limit_s` has failed. A secret that is lost is an InputError that names it.
    """
    failed: dict[str, TpuswarmError] = {}
    left: set[str] = set()
    at: dict[str, str] = {}
    tree, table = routes.fleet.tree.load(), SavedSetup(routes.fleet).table()
    try:
        async with asyncio.timeout(limit_s + HANG_GRACE_S) as limit:
            if tree is not None:
                hosts, _ = await asyncio.to_thread(routes.hosts, where)
                at.update({host.label: "sync" for host in hosts})
                async with Connections(routes.key) as connections:
                    sent = await send(connections, hosts, tree, routes.fleet.tree, leaves=True)
                failed |= {host.label: error for host, error in sent.failed.items()}
                left.update(path for paths in sent.left.values() for path in paths)
            if table is not None:
                found = await asyncio.to_thread(find_setup_targets, routes, table, where)
                machines = [each for each in found.machines if each.host.label not in failed]

                def told(host: Host, step: str, what: str) -> None:
                    at[host.label] = step
                    limit.reschedule(asyncio.get_running_loop().time() + limit_s + HANG_GRACE_S)

                if machines:
                    # Values from a keeper's own environment may be older than those that a person has given since.
                    outcome = await set_up_all(routes, table, machines, told, {}, limit_s)
                    failed |= {host.label: error for host, error in outcome.failed.items()}
    except TimeoutError:
        step = "; ".join(f"{label}: {step}" for label, step in sorted(at.items()) if step) or where
        failed[where] = RunFailed(
            f"{step}: nothing has moved for {(limit_s + HANG_GRACE_S) / 60:.0f} minutes: given up"
        )
    return PrepareResult(failed, tuple(sorted(left)))


class BootState(NamedTuple):
    """When something is about to begin on a machine: a reboot, or another machine of the name, is another one."""

    created: float
    """When the machine was created."""
    runs: int | None
    """How many runs have begun on it before; None: it does not answer."""

    def is_that(self, other: "BootState") -> bool:
        """Whether both may be the same: silence is no other beginning."""
        return self.created == other.created and (None in (self.runs, other.runs) or self.runs == other.runs)


class Preparer:
    """Prepares machines beside whoever carries jobs out. To be used in one event loop."""

    def __init__(self, routes: Routes):
        self._routes = routes
        self._tasks: dict[str, tuple[BootState, asyncio.Task[PrepareResult]]] = {}
        self.left: dict[str, str] = {}
        """By machine, what was changed there and stays so, in words."""
        self._failed: dict[str, tuple[float, str]] = {}
        """When a machine is prepared again, by the even clock, and why; infinity: it is being prepared."""
        self._failures: dict[str, tuple[float, int]] = {}
        """By machine, when it was created and how often it could not be prepared."""
        self._prepared: dict[str, str | None] = {}
        """Machines that were, and the table with which."""
        self._table: str | None = None

    def unusable(self, tpus: Mapping[str, float]) -> dict[str, tuple[float, str]]:
        """Which of these machines cannot be prepared, though another one of them was, with the same table.

        tpus: when each was created. For each of the found, when that was, and why it cannot be.
        """
        if not any(table == self._table for name, table in self._prepared.items() if name in tpus):
            return {}
        return {
            name: (created, self._failed[name][1])
            for name, (created, failures) in self._failures.items()
            if failures >= MAX_FAILURES and tpus.get(name) == created
        }

    def look(self, machines: Mapping[str, BootState], answer: Collection[str]) -> dict[str, str]:
        """Which of these are not prepared yet, and why; begins what has to be done.

        answer: machines that answer now: where no other one does, it is the way to them that is to blame.
        """
        table = SavedSetup(self._routes.fleet).table()
        self._table = None if table is None else table.model_dump_json()
        if table is None and self._routes.fleet.tree.load() is None:
            return {}
        found = {}
        for name, begins in machines.items():
            before, task = self._tasks.get(name, (None, None))
            again, why = self._failed.get(name, (math.inf, ""))
            same = before is not None and before.is_that(begins)
            if task is None or (task.done() and (not same or time.monotonic() > again)):
                task = asyncio.ensure_future(prepare_machine(self._routes, name))
                self._tasks[name] = (begins, task)
                again = math.inf
                self._failed[name] = (again, why)
            elif same and begins.runs is not None:
                self._tasks[name] = (begins, task)
            if not task.done():
                found[name] = why or f"{name} is being set up"
            elif said := _why(task):
                if again == math.inf:  # the first look since it failed
                    self._failed[name] = (time.monotonic() + RETRY_S, said)
                    self._prepared.pop(name, None)
                    if task.exception() is None and set(answer) - {name}:  # else this computer can prepare none
                        created, failures = self._failures.get(name, (begins.created, 0))
                        self._failures[name] = (begins.created, failures + 1 if created == begins.created else 1)
                found[name] = said
            else:
                self._failed.pop(name, None)
                self._failures.pop(name, None)
                self._prepared[name] = self._table
                self.left.pop(name, None)
                if paths := task.result().left:
                    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
                    self.left[name] = f"{', '.join(paths[:3])}{more} stay as they were changed there"
        return found


def _why(task: "asyncio.Task[PrepareResult]") -> str:
    """Why a machine could not be prepared; empty: it was."""
    error = task.exception()
    if error is None:
        return "; ".join(str(each) for each in task.result().failed.values())
    # Files of this computer may be damaged, or its disk full: the job waits for it, and says so.
    return str(error) if isinstance(error, TpuswarmError) else f"{type(error).__name__}: {error}"
