"""The keeper on the fleet's own head: put there from this computer, started, and seen to lead."""

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
from tpuswarm.fleet.store.fleets import Fleet, Store
from tpuswarm.remote.attended import Attended
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.copy import put
from tpuswarm.remote.host import Host
from tpuswarm.remote.setup.bundle import bundle
from tpuswarm.remote.setup.keeper import FOLDER, TREE, Home, keeper
from tpuswarm.remote.setup.package import PYTHON
from tpuswarm.remote.setup.python import BUNDLE
from tpuswarm.remote.setup.run import Told, set_up
from tpuswarm.remote.setup.step import Step
from tpuswarm.remote.setup.wheel import versions, wheel
from tpuswarm.train.process.platform import cache_folder

SETUP_FILES = ("setup.json", "versions.json", "secrets.json")
"""What set-up keeps of a fleet in files of this computer."""
LEAD_TIMEOUT_S = 90.0
"""Seconds in which a keeper that was started should lead."""


async def install_head_keeper(routes: Routes, told: Told = lambda host, step, what: None) -> Host:
    """Put the keeper on the head, with what this computer knows, and start it there: what holds already is left."""
    (host,), _ = await asyncio.to_thread(routes.hosts, HEAD)
    fleet, cache = routes.fleet, cache_folder("machines")
    package, tree = wheel(cache), fleet.tree.load()
    home = Home(
        machine=host.label.partition("/")[0],
        user=host.user,
        fleet=fleet.name,
        state=f".local/state/tpuswarm/fleets/{fleet.project}/{fleet.name}",
        files=_known(fleet),
        tree=tree.digest if tree else None,
        wheel=package.name,
        versions=versions(),
    )

    async def send(connections: Connections, host: Host, step: Step) -> str:
        if step.id == "keeper-python":
            await put(connections, host, await asyncio.to_thread(bundle, PYTHON, cache), BUNDLE)
            return "uv and Python"
        if step.id == "keeper-tree":
            with TemporaryDirectory() as folder:
                packed = Path(folder) / "tree.tar"
                with tarfile.open(packed, "w") as tar:
                    tar.add(fleet.folder / "tree", ".")
                await put(connections, host, packed, TREE)
            return "what was synced last"
        await put(connections, host, package, f"{FOLDER}/{package.name}")
        return package.name

    async with Connections(routes.key) as connections:
        outcome = await set_up(connections, {host: keeper(home)}, told, send=send)
    for error in outcome.failed.values():
        raise error
    return host


def _known(fleet: Fleet) -> dict[str, str]:
    found = {"fleet.json": json.dumps(asdict(fleet))}
    for name in SETUP_FILES:
        file = fleet.folder / name
        if file.exists():
            found[name] = file.read_text(encoding="utf-8")
    return found


async def wait_for_head_keeper(routes: Routes, store: Store, host: Host) -> None:
    """Wait until the keeper on the head leads. RunFailed with the end of its log where it does not."""
    home, until = host.label.partition("/")[0], time.monotonic() + LEAD_TIMEOUT_S
    while time.monotonic() < until:
        document = await asyncio.to_thread(store.load)
        if document and document.lease and document.lease.host == home:
            return
        await asyncio.sleep(0.5)
    said: list[bytes] = []
    log = f"~/.local/state/tpuswarm/fleets/{reach.fleet.project}/{reach.fleet.name}/keeper.log"
    async with Connections(routes.key) as connections:
        await Attended(connections, host, f"tail -n 1 {log}").run(lambda data, is_error: said.append(data))
    words = b"".join(said).decode(errors="replace").strip() or "it said nothing"
    raise RunFailed(
        f"the keeper on {home} does not lead after {LEAD_TIMEOUT_S:.0f} s: {words}; "
        "`tpuswarm keep` keeps the fleet from here"
    )


class HeadKeeper:
    """Beside a keeper elsewhere that leads: sees to it that one lives on the head, and then leaves the lease to it."""

    def __init__(self, keeping: Keeper, make: Callable[[], Routes], tell: Callable[[str], None]):
        self._keeping, self._make, self._tell = keeping, make, tell
        self._thread: threading.Thread | None = None
        self._over = self._done = False
        self._not_before = 0.0

    def look(self, tick: Tick, here: str | None) -> None:
        """The keeper has looked, and leads. `here`: the machine of the fleet that it lives on itself, if any."""
        desired = tick.document.desired
        name = desired.keeper_machine
        if self._done:
            self._done = False
            self._tell(f"the keeper on {name} goes on; this one watches")
            self._keeping.stand_back()
            return
        ready = any(
            each.name == name and each.fleet == desired.fleet and each.state == "ready"
            for each in tick.observed.machines
        )
        if name in (None, here) or not ready or desired.down is not None or self._thread is not None:
            return
        if time.monotonic() > self._not_before:
            self._thread = threading.Thread(target=self._run, name="seating", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            routes = self._make()
            for error in asyncio.run(prepare_machine(routes, HEAD)).failed.values():
                raise error
            asyncio.run(install_head_keeper(routes))
            self._done = True
        except (CloudError, TpuswarmError) as error:
            self._tell(f"the keeper on the head: {error}; tried again")
        finally:
            self._not_before = time.monotonic() + RETRY_S
            self._thread = None
