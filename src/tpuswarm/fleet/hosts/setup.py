"""Set up the fleet's machines, and remember the set-up for machines that come later."""

import asyncio
import json
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.fleet.decide.names import ALL
from tpuswarm.fleet.hosts.routers import client_settings
from tpuswarm.fleet.hosts.routes import NoHostKey, Routes
from tpuswarm.fleet.hosts.targets import find_targets
from tpuswarm.fleet.store.fleets import Fleet
from tpuswarm.remote.connect import Connections, fan_out
from tpuswarm.remote.host import Host, HostUnreachable
from tpuswarm.remote.setup.artifacts import build_wheel, file_sender
from tpuswarm.remote.setup.machine_steps import Machine, steps
from tpuswarm.remote.setup.python import WHEELS, names_ours, notebook
from tpuswarm.remote.setup.run import OnProgress, Outcome, set_up
from tpuswarm.remote.setup.step import STEP_TIMEOUT_S, FileUnavailable, Send
from tpuswarm.remote.setup.table import Setup, gather_secrets
from tpuswarm.remote.sync.send import send
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.platform import cache_folder

SSH_TIMEOUT_S, SSH_POLL_INTERVAL_S = 300.0, 1.0
RETRY_S = 30.0
MAX_FAILURES = 2
"""A machine that fails so often, while others succeed, is unusable."""
HANG_GRACE_S = 300.0
"""Give up if a machine shows no progress for this long after the limit of a step, which the machine enforces itself."""
NO_TABLE = "null"
"""Stored if the fleet has no [setup]."""


class SavedSetup:
    def __init__(self, fleet: Fleet):
        self._table, self._versions = fleet.folder / "setup.json", fleet.folder / "versions.json"
        self.secrets_file = fleet.folder / "secrets.json"

    def table(self) -> Setup | None:
        text = _read_text(self._table)
        return None if text in ("", NO_TABLE) else Setup.model_validate_json(text)

    def save(self, table: Setup | None) -> None:
        """Save the table, even if empty: a keeper elsewhere may have an older one."""
        self._table.parent.mkdir(parents=True, exist_ok=True)
        text = NO_TABLE if table is None else table.without_files().model_dump_json()
        write_atomically(self._table, text, is_shared=True)

    def versions(self, packages: str) -> str:
        """Return the installed versions of a list of packages, given its stamp; empty if none is installed."""
        try:
            stored = json.loads(_read_text(self._versions))
        except ValueError:
            return ""
        return str(stored["versions"]) if stored["of"] == packages else ""

    def save_versions(self, packages: str, versions: str) -> None:
        if versions:
            write_atomically(self._versions, json.dumps({"of": packages, "versions": versions}), is_shared=True)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


class SetupTargets(NamedTuple):
    machines: tuple[Machine, ...]
    away: tuple[str, ...]


def find_setup_targets(routes: Routes, table: Setup, where: str = ALL) -> SetupTargets:
    """Find the hosts that `where` means, and the server of [setup.nfs], which must let them in. Raise InputError."""
    snapshot = routes.snapshot()
    desired = snapshot.document.desired
    selection = find_targets(where, desired, snapshot.listing)
    targets, server, clients = selection.targets, None, tuple[str, ...]()
    if table.nfs:
        all_targets = find_targets(ALL, desired, snapshot.listing).targets
        server = next((target for target in all_targets if target.machine.pool == table.nfs.server), None)
        if server is None:
            raise InputError(f"{table.nfs.server}, the server of [setup.nfs], is not ready: `tpuswarm list` shows why")
        clients = tuple(sorted(target.internal for target in all_targets if target != server))
        targets += () if server in targets else (server,)
    pools_with_disks = {pool.name for pool in desired.pools if getattr(pool.spec, "disks", ())}
    machines = tuple(
        Machine(
            host,
            target == server,
            None if server is None or target == server else server.internal,
            target.machine.pool in pools_with_disks,
            clients if target == server else (),
            client_settings(desired) if target.machine.kind == "tpu" else (),
            target.machine.pool or "",
        )
        for host, target in zip(routes.route_to(snapshot, targets), targets, strict=True)
    )
    return SetupTargets(machines, selection.away)


async def wait_for_ssh(routes: Routes, timeout_s: float = SSH_TIMEOUT_S) -> None:
    """Wait until machines that are new to this computer accept its connections, or until the time is over.

    The cloud calls a machine ready before it has published its SSH host key, started sshd and created the user.
    """
    snapshot = await asyncio.to_thread(routes.snapshot)
    targets = find_targets(ALL, snapshot.document.desired, snapshot.listing).targets
    known = routes.known.keys()
    new = [target for target in targets if target.alias not in known]
    deadline = time.monotonic() + timeout_s
    async with Connections(routes.key) as connections:
        while new and time.monotonic() < deadline:
            try:
                hosts = await asyncio.to_thread(routes.route_to, snapshot, new)
                results = await fan_out(hosts, connections.to)
                if not any(isinstance(result, HostUnreachable) for result in results):
                    return
            except NoHostKey:
                pass
            except InputError:
                return  # no way leads there from this computer, which the next command says
            await asyncio.sleep(SSH_POLL_INTERVAL_S)


async def set_up_all(
    routes: Routes,
    table: Setup,
    machines: Iterable[Machine],
    on_progress: OnProgress = lambda host, step, state: None,
    environment: Mapping[str, str] = os.environ,
    limit_s: float = STEP_TIMEOUT_S,
) -> Outcome:
    """Set up these machines. Raise InputError for a secret that is neither in `environment` nor saved.

    `limit_s`: for each step.
    """
    saved, table = SavedSetup(routes.fleet), table.without_files()
    secrets = gather_secrets(saved.secrets_file, table.secrets, environment)
    saved.save(table)
    wheel = build_wheel(cache_folder("machines")).name if names_ours(table) else ""
    steps_by_host = {machine.host: steps(table, machine, secrets, wheel) for machine in machines}
    packages = next(step.stamp for step in next(iter(steps_by_host.values())) if step.decides_versions)

    async with Connections(routes.key) as connections:
        outcome = await set_up(
            connections, steps_by_host, on_progress, saved.versions(packages), _file_sender(table), limit_s
        )
    saved.save_versions(packages, outcome.versions)
    return outcome


async def install_notebook(routes: Routes, hosts: Iterable[Host], on_progress: OnProgress) -> Outcome:
    table = SavedSetup(routes.fleet).table() or Setup()
    async with Connections(routes.key) as connections:
        steps_by_host = dict.fromkeys(hosts, notebook(table.python))
        return await set_up(connections, steps_by_host, on_progress, send=_file_sender(table))


def _file_sender(table: Setup) -> Send:
    return file_sender(WHEELS, cache_folder("machines"), table.python)


class PrepareResult(NamedTuple):
    failed: Mapping[str, TpuswarmError]
    kept: tuple[str, ...] = ()
    """Synced files that keep the changes made on a host."""


async def prepare_machine(routes: Routes, where: str, limit_s: float = STEP_TIMEOUT_S) -> PrepareResult:
    """Sync the last folder and run set-up on a machine that comes back, without a person.

    Files that were changed on a host stay. A step that takes longer than `limit_s` fails. Raise InputError for a
    missing secret.
    """
    failed: dict[str, TpuswarmError] = {}
    kept: set[str] = set()
    progress: dict[str, str] = {}
    tree, table = routes.fleet.tree_store.load(), SavedSetup(routes.fleet).table()
    timeout_s = limit_s + HANG_GRACE_S
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            if tree is not None:
                hosts, _ = await asyncio.to_thread(routes.hosts, where)
                progress.update({host.label: "sync" for host in hosts})
                async with Connections(routes.key) as connections:
                    sent = await send(connections, hosts, tree, routes.fleet.tree_store, keep_edited=True)
                failed |= {host.label: error for host, error in sent.failed.items()}
                kept.update(path for paths in sent.kept.values() for path in paths)
            if table is not None:
                targets = await asyncio.to_thread(find_setup_targets, routes, table, where)
                machines = [machine for machine in targets.machines if machine.host.label not in failed]

                def on_progress(host: Host, step: str, state: str) -> None:
                    progress[host.label] = step
                    timeout.reschedule(asyncio.get_running_loop().time() + timeout_s)

                if machines:
                    # A keeper's own environment may be older than the secrets that a person has saved since.
                    outcome = await set_up_all(routes, table, machines, on_progress, {}, limit_s)
                    failed |= {host.label: error for host, error in outcome.failed.items()}
    except TimeoutError:
        step = "; ".join(f"{label}: {step}" for label, step in sorted(progress.items()) if step) or where
        failed[where] = RunFailed(f"{step}: no progress for {timeout_s / 60:.0f} minutes: given up")
    return PrepareResult(failed, tuple(sorted(kept)))


class BootState(NamedTuple):
    """Identifies a boot of a machine: after a reboot, or a new creation, it must be prepared again."""

    created: float
    runs: int | None
    """How many runs have started on it; None: it does not answer."""

    def may_equal(self, other: "BootState") -> bool:
        """Whether both may be the same boot; a machine that does not answer has not rebooted."""
        return self.created == other.created and (None in (self.runs, other.runs) or self.runs == other.runs)


class Preparer:
    """Prepares machines beside the job runner. Use it in one event loop."""

    def __init__(self, routes: Routes):
        self._routes = routes
        self._tasks: dict[str, tuple[BootState, asyncio.Task[PrepareResult]]] = {}
        self.kept_changes: dict[str, str] = {}
        """By machine, a sentence about files that stay changed there."""
        self._retries: dict[str, tuple[float, str]] = {}
        """By machine, when to try again (infinity while it is being prepared), and the last error."""
        self._failures: dict[str, tuple[float, int]] = {}
        """By machine, its creation time and number of failures."""
        self._prepared: dict[str, str | None] = {}
        self._table: str | None = None

    def unusable(self, tpus: Mapping[str, float]) -> dict[str, tuple[float, str]]:
        """Return TPUs that cannot be prepared though another one succeeded with the same [setup].

        `tpus`: creation times. Return creation times and errors.
        """
        if not any(table == self._table for name, table in self._prepared.items() if name in tpus):
            return {}
        return {
            name: (created, self._retries[name][1])
            for name, (created, failures) in self._failures.items()
            if failures >= MAX_FAILURES and tpus.get(name) == created
        }

    def update(self, machines: Mapping[str, BootState], answering: Collection[str]) -> dict[str, str]:
        """Prepare new and rebooted machines; return those still unprepared, and why.

        `answering`: machines that answer. If no other machine does, a failure is this computer's fault.
        """
        table = SavedSetup(self._routes.fleet).table()
        self._table = None if table is None else table.model_dump_json()
        if table is None and self._routes.fleet.tree_store.load() is None:
            return {}
        unprepared = {}
        for name, boot in machines.items():
            last_boot, task = self._tasks.get(name, (None, None))
            retry_at, why = self._retries.get(name, (math.inf, ""))
            same_boot = last_boot is not None and last_boot.may_equal(boot)
            if task is None or (task.done() and (not same_boot or time.monotonic() > retry_at)):
                task = asyncio.ensure_future(prepare_machine(self._routes, name))
                self._tasks[name] = (boot, task)
                retry_at = math.inf
                self._retries[name] = (retry_at, why)
            elif same_boot and boot.runs is not None:
                self._tasks[name] = (boot, task)
            if not task.done():
                unprepared[name] = why or f"{name} is being set up"
            elif error := _error(task):
                if retry_at == math.inf:  # it has failed since the last update
                    self._retries[name] = (time.monotonic() + RETRY_S, error)
                    self._prepared.pop(name, None)
                    if _is_its_fault(task) and set(answering) - {name}:
                        created, failures = self._failures.get(name, (boot.created, 0))
                        self._failures[name] = (boot.created, failures + 1 if created == boot.created else 1)
                unprepared[name] = error
            else:
                self._retries.pop(name, None)
                self._failures.pop(name, None)
                self._prepared[name] = self._table
                self.kept_changes.pop(name, None)
                if paths := task.result().kept:
                    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
                    self.kept_changes[name] = f"{', '.join(paths[:3])}{more} stay as they were changed there"
        return unprepared


def _is_its_fault(task: "asyncio.Task[PrepareResult]") -> bool:
    """Return whether the machine failed, and not this computer."""
    errors = () if task.exception() else task.result().failed.values()
    return any(not isinstance(error, FileUnavailable) for error in errors)


def _error(task: "asyncio.Task[PrepareResult]") -> str:
    """Return why a machine could not be prepared; empty if it was."""
    error = task.exception()
    if error is None:
        return "; ".join(str(failure) for failure in task.result().failed.values())
    # This computer's files may be damaged, or its disk full: the job waits and says so.
    return str(error) if isinstance(error, TpuswarmError) else f"{type(error).__name__}: {error}"
