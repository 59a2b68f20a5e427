"""Read a run and its fleet again and again while a page is open, and send every page the changes."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.fleet.hosts.routes import Routes
from tpuswarm.swarm.views.status import RunView, read_run
from tpuswarm.train.look.pictures import FOLDER, GENERATED_PATTERN
from tpuswarm.train.run.directory import CONFIG, read_config
from tpuswarm.train.run.listing import Status, list_runs, read_status
from tpuswarm.train.storage.copy import download_run
from tpuswarm.train.storage.folders import copy_folder, is_url
from tpuswarm.watch.page.history import History
from tpuswarm.watch.page.hosts import FollowedHosts
from tpuswarm.watch.page.view import Sections, changed_sections, make_sections
from tpuswarm.watch.state import Machines, State

REFRESH_INTERVAL_S = 1.0
REMOTE_REFRESH_INTERVAL_S = 5.0
"""For buckets and clouds."""
MAX_QUEUED_UPDATES = 32
"""For a page that does not read them; then it gets the whole view."""
HEARTBEAT_INTERVAL_S = 10.0
"""Sent to pages without updates."""
MAX_RUNS = 30
"""Newest runs in the list."""
MAX_PICTURES = 500
"""The newest samples of the model."""

Message = tuple[str, str]
"""Kind and data of a server-sent event."""


class Subject(NamedTuple):
    """The run, the fleet, or both of a page."""

    run: str
    """A folder, or gs://BUCKET/FOLDER; empty: no run."""
    runs: Path | None = None
    """A folder whose runs are listed."""
    is_newest: bool = False
    """Whether to show the run in `runs` that was used last, whichever it is then."""
    read: Callable[[], Any] | None = None
    """Reads document, listing and events of the fleet."""
    routes: Routes | None = None


class LivePage:
    """A page and its watchers, in one event loop; only `open` may run before it."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self.hosts = FollowedHosts(subject.routes)
        self._history: History | None = None
        self._config_identity: tuple[int, int] | None = None
        self._run: RunView | Status | None = None
        self._runs: list[list[Any]] = []
        """Name, state, loss, step and steps of each run in the list."""
        self._listed_at = -math.inf
        self._machines: Machines | None = None
        self._problems: dict[str, str] = {}
        """Current errors by source."""
        self._shown: Sections = {}
        self._view: dict[str, Any] = {}
        """The view after the last update."""
        self._queues: set[asyncio.Queue[Message]] = set()
        self._has_viewers = asyncio.Event()
        self._lock = asyncio.Lock()
        self._read_at = self._fetched_at = 0.0

    @property
    def folder(self) -> Path | None:
        """The run's folder on this disk."""
        if not self.subject.run:
            return None
        return copy_folder(self.subject.run) if is_url(self.subject.run) else Path(self.subject.run)

    def open(self) -> None:
        """Read everything for the first time; raise InputError if a run without a fleet is missing."""
        if self.subject.read is not None:
            self._machines = Machines(*self.subject.read())
        self._list_runs()
        if self.subject.run:
            try:
                self._fetch_run()
                self._read_run()
            except InputError:
                if self.subject.read is None:
                    raise
        self._shown = self._sections()
        self._view = self.view()

    def state(self) -> State:
        """Return the last state."""
        return State(self.subject.run, self._run, self._machines, self._read_at or time.time())

    def view(self) -> dict[str, Any]:
        """Return the whole view."""
        view = dict(self._shown)
        if self._history is not None:
            growing = ("losses", "speeds", "evaluations", "names", "columns", "events")
            view |= {name: list(getattr(self._history, name)) for name in growing}
        return view

    async def messages(self) -> AsyncIterator[Message]:
        """Yield the whole view, then updates, for one page."""
        queue: asyncio.Queue[Message] = asyncio.Queue(MAX_QUEUED_UPDATES)
        first = "view", _to_json(self._view)
        self._queues.add(queue)
        self._has_viewers.set()
        try:
            yield first
            while True:
                try:
                    yield await asyncio.wait_for(queue.get(), HEARTBEAT_INTERVAL_S)
                except TimeoutError:
                    yield "beat", ""
        finally:
            self._queues.discard(queue)
            if not self._queues:
                self._has_viewers.clear()

    async def fresh(self) -> State:
        """Return a state that was read just now."""
        if time.time() - self._read_at > REFRESH_INTERVAL_S:
            await self._update(fresh=True)
        return self.state()

    async def watch(self) -> None:
        """Read while pages are open, until cancelled."""
        async with self.hosts:
            tasks = [asyncio.create_task(watch) for watch in (self._watch_run(), self._watch_fleet())]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def older(self, at: int) -> dict[str, Any]:
        """Return events before an offset of their file."""
        history = self._history
        if history is None:
            return {"events": [], "at": 0}
        async with self._lock:
            events, begin = await asyncio.to_thread(history.read_older, at)
        return {"events": events, "at": begin}

    async def _watch_run(self) -> None:
        while True:
            await self._has_viewers.wait()
            await self._fetch()
            await self._update()
            await asyncio.sleep(REFRESH_INTERVAL_S)

    async def _watch_fleet(self) -> None:
        while self.subject.read is not None:
            if not self._has_viewers.is_set():
                self.hosts.pause()
                await self._has_viewers.wait()
            await self._read_machines()
            await self.hosts.follow()
            await asyncio.sleep(REMOTE_REFRESH_INTERVAL_S)

    async def _read_machines(self) -> None:
        assert self.subject.read is not None
        try:
            self._machines = Machines(*await asyncio.to_thread(self.subject.read))
            self._problems.pop("fleet", None)
        except (TpuswarmError, OSError) as error:
            self._problems["fleet"] = str(error)

    async def _fetch(self) -> None:
        """Fetch the run from its bucket, if it is time."""
        if not is_url(self.subject.run) or time.monotonic() - self._fetched_at < REMOTE_REFRESH_INTERVAL_S:
            return
        self._fetched_at = time.monotonic()
        try:
            await asyncio.to_thread(self._fetch_run)
            self._problems.pop("bucket", None)
        except InputError:  # reading the copy reports it
            self._problems.pop("bucket", None)
        except Exception as error:  # noqa: BLE001 - a temporary error of a cloud's library must not end the page
            reason = str(error).strip().partition("\n")[0]
            self._problems["bucket"] = f"{self.subject.run} cannot be read now: {reason or type(error).__name__}"

    async def _update(self, fresh: bool = False) -> None:
        if fresh and not self._has_viewers.is_set():  # `watch` reads nothing then
            await self._fetch()
            if self.subject.read is not None:
                await self._read_machines()
        async with self._lock:
            changes = await asyncio.to_thread(self._read_changes)
            now = self._sections()
            changed = None if changes is None else changed_sections(self._shown, now) | changes
            self._shown = now
            self._view = self.view()
            if changed is None:
                self._publish("view", self._view)
            else:
                self._publish("update", changed)

    def _read_changes(self) -> dict[str, Any] | None:
        """Read the changes in the run's files; None if they are new, or were replaced."""
        try:
            self._list_runs()
            if not self.subject.run:
                self._read_at = time.time()
                return {}
            is_new = self._read_run()
            history = self._history
            assert history is not None and self.folder is not None
            if is_new or (updates := history.read_new()) is None:
                self._history = History(self.folder, isinstance(self._run, RunView))
                return None
        except (TpuswarmError, OSError) as error:
            self._problems["run"] = str(error)
            return {}
        self._problems.pop("run", None)
        changes = {name: value for name, value in updates._asdict().items() if value}
        return changes | ({"names": history.names} if updates.columns else {})

    def _list_runs(self) -> None:
        """List the runs, and turn to the one used last, if it is time."""
        if self.subject.runs is None or time.monotonic() - self._listed_at < REMOTE_REFRESH_INTERVAL_S:
            return
        self._listed_at = time.monotonic()
        folders = list_runs(self.subject.runs)[:MAX_RUNS]
        self._runs = [_describe_run(folder) for folder in folders]
        if folders and self.subject.is_newest:
            self.subject = self.subject._replace(run=str(folders[0]))

    def _fetch_run(self) -> None:
        if is_url(self.subject.run):
            download_run(self.subject.run)

    def _read_run(self) -> bool:
        """Read the run; return whether it is new, or was replaced by another one."""
        folder = self.folder
        assert folder is not None
        self._read_at = time.time()
        self._run = _read_view(folder)
        status_of_config = (folder / CONFIG).stat()
        before, self._config_identity = self._config_identity, (status_of_config.st_ino, status_of_config.st_mtime_ns)
        is_new = self._history is None
        if is_new:
            self._history = History(folder, isinstance(self._run, RunView))
        return is_new or before != self._config_identity

    def _sections(self) -> Sections:
        sections = make_sections(self.state(), self.hosts.rows(self.state()))
        return sections | {
            "problems": sorted(self._problems.values()),
            "pictures": self._pictures(),
            "runs": self._runs,
        }

    def _pictures(self) -> list[int]:
        folder = self.folder
        if folder is None:
            return []
        return sorted(int(file.stem) for file in (folder / FOLDER).glob(GENERATED_PATTERN))[-MAX_PICTURES:]

    def _publish(self, kind: str, data: dict[str, Any]) -> None:
        message = kind, _to_json(data)
        for queue in self._queues:
            if queue.full():  # a sleeping page gets the whole view when it wakes
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(("view", _to_json(self._view)))
            else:
                queue.put_nowait(message)


def _read_view(folder: Path) -> RunView | Status:
    return read_run(folder) if "swarm" in read_config(folder) else read_status(folder)


def _describe_run(folder: Path) -> list[Any]:
    try:
        run = _read_view(folder)
    except InputError:
        return [folder.name, "damaged", None, None, None]
    return [folder.name, run.state, run.loss, run.step, run.steps]


def _to_json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))
