"""Install a keeper on the fleet's own head, start it, and hand the lease over."""

import asyncio
import json
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from tpuswarm.cloud.errors import CloudError
from tpuswarm.errors import RunFailed, TpuswarmError
from tpuswarm.fleet.hosts.routes import Routes
from tpuswarm.fleet.hosts.setup import RETRY_S, prepare_machine
from tpuswarm.fleet.keeper.keeper import Keeper, Tick
from tpuswarm.fleet.spec.file import HEAD
from tpuswarm.fleet.store.document import DocumentStore
from tpuswarm.fleet.store.fleets import Fleet
from tpuswarm.remote.connect import Connections, run_shell
from tpuswarm.remote.copy import upload
from tpuswarm.remote.host import Host
from tpuswarm.remote.setup.artifacts import build_wheel, file_sender, installed_versions
from tpuswarm.remote.setup.run import OnProgress, set_up
from tpuswarm.remote.setup.services import KEEPER_FOLDER, TREE, KeeperOptions, keeper
from tpuswarm.remote.setup.step import Step
from tpuswarm.train.process.platform import cache_folder

SETUP_FILES = ("setup.json", "versions.json", "secrets.json")
LEAD_TIMEOUT_S = 90.0


async def install_head_keeper(routes: Routes, on_progress: OnProgress = lambda host, step, state: None) -> Host:
    """Install and start the keeper on the head with this computer's files of the fleet; skip finished steps."""
    (host,), _ = await asyncio.to_thread(routes.hosts, HEAD)
    fleet, cache = routes.fleet, cache_folder("machines")
    tree = fleet.tree_store.load()
    options = KeeperOptions(
        machine=host.label.partition("/")[0],
        user=host.user,
        fleet=fleet.name,
        state=f".local/state/tpuswarm/fleets/{fleet.project}/{fleet.name}",
        files=_fleet_files(fleet),
        tree=tree.digest if tree else None,
        wheel=build_wheel(cache).name,
        constraints=installed_versions(),
    )

    send_package = file_sender(KEEPER_FOLDER, cache)

    async def send(connections: Connections, host: Host, step: Step) -> str:
        if step.id != "keeper-tree":
            return await send_package(connections, host, step)
        with TemporaryDirectory() as folder:
            packed = Path(folder) / "tree.tar"
            with tarfile.open(packed, "w") as tar:
                tar.add(fleet.folder / "tree", ".")
            await upload(connections, host, packed, TREE)
        return "the synced folder"

    async with Connections(routes.key) as connections:
        outcome = await set_up(connections, {host: keeper(options)}, on_progress, send=send)
    for error in outcome.failed.values():
        raise error
    return host


def _fleet_files(fleet: Fleet) -> dict[str, str]:
    files = {"fleet.json": json.dumps(asdict(fleet))}
    for name in SETUP_FILES:
        file = fleet.folder / name
        if file.exists():
            files[name] = file.read_text(encoding="utf-8")
    return files


async def wait_for_head_keeper(routes: Routes, store: DocumentStore, host: Host) -> None:
    machine, deadline = host.label.partition("/")[0], time.monotonic() + LEAD_TIMEOUT_S
    while time.monotonic() < deadline:
        document = await asyncio.to_thread(store.load)
        if document and document.lease and document.lease.host == machine:
            return
        await asyncio.sleep(0.5)
    log = f"~/.local/state/tpuswarm/fleets/{routes.fleet.project}/{routes.fleet.name}/keeper.log"
    async with Connections(routes.key) as connections:
        _, output, errors = await run_shell(connections, host, f"tail -n 1 {log}")
    words = (output or errors).decode(errors="replace").strip() or "its log is empty"
    raise RunFailed(
        f"the keeper on {machine} does not lead after {LEAD_TIMEOUT_S:.0f} s: {words}; "
        "`tpuswarm keep` keeps the fleet from here"
    )


class HeadKeeper:
    """Installs a keeper on the head beside a keeper that leads elsewhere, and then leaves the lease to it."""

    def __init__(self, keeper: Keeper, make_routes: Callable[[], Routes], log: Callable[[str], None]):
        self._keeper, self._make_routes, self._log = keeper, make_routes, log
        self._thread: threading.Thread | None = None
        self._installed = False
        self._not_before = 0.0

    def update(self, tick: Tick, here: str | None) -> None:
        """Begin or finish the installation after a tick. `here`: the fleet's machine that runs this keeper, if any."""
        desired = tick.document.desired
        name = desired.keeper_machine
        if self._installed:
            self._installed = False
            self._log(f"the keeper on {name} takes over; this one watches")
            self._keeper.stand_back()
            return
        ready = any(
            machine.name == name and machine.fleet == desired.fleet and machine.state == "ready"
            for machine in tick.observed.machines
        )
        if name in (None, here) or not ready or desired.down is not None or self._thread is not None:
            return
        if time.monotonic() > self._not_before:
            self._thread = threading.Thread(target=self._install, name="head keeper", daemon=True)
            self._thread.start()

    def _install(self) -> None:
        try:
            routes = self._make_routes()
            for error in asyncio.run(prepare_machine(routes, HEAD)).failed.values():
                raise error
            asyncio.run(install_head_keeper(routes))
            self._installed = True
        except (CloudError, TpuswarmError) as error:
            self._log(f"the keeper on the head: {error}; trying again")
        finally:
            self._not_before = time.monotonic() + RETRY_S
            self._thread = None
