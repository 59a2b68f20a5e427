"""What a page is about, looked at again and again while somebody looks at the page, and told to everybody who does."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.fleet.hosts.routes import Routes
from tpuswarm.swarm.views.status import RunView, read_run
from tpuswarm.train.look.pictures import FOLDER, MADE
from tpuswarm.train.run.directory import CONFIG, read_config
from tpuswarm.train.run.listing import Status, status
from tpuswarm.train.storage.copy import bring
from tpuswarm.train.storage.folders import folder_of, is_url
from tpuswarm.watch.page.history import History
from tpuswarm.watch.page.hosts import Hosts
from tpuswarm.watch.page.view import Sections, changes, sections
from tpuswarm.watch.state import Machines, State

EVERY, EVERY_FAR = 1.0, 5.0
"""Seconds between two looks: at files of this disk; at a bucket and a cloud."""
WAITING = 32
"""Updates for a page that does not take them, before it gets the whole again."""
BEAT = 10.0
"""Seconds without an update after which a page is told that it is still connected."""
PICTURES = 500
"""Of those that the model made, the newest are shown."""

Message = tuple[str, str]
"""The kind of an event for the page, and its data."""


class Subject(NamedTuple):
    """What a page is about: a run, a fleet, or both."""

    run: str
    """A folder, or gs://BUCKET/FOLDER; empty: there is none."""
    read: Callable[[], Any] | None = None
    """Document, listing and events of the fleet."""
    routes: Routes | None = None
    """The way to its hosts."""


class Live:
    """To be used in one event loop, but for `open`."""

    def __init__(self, subject: Subject):
        self._subject = subject
        self.hosts = Hosts(subject.routes)
        self._history: History | None = None
        self._born: tuple[int, int] | None = None
        self._look: RunView | Status | None = None
        self._machines: Machines | None = None
        self._problems: dict[str, str] = {}
        """Why something cannot be seen now, by what it is."""
        self._shown: Sections = {}
        self._whole: dict[str, Any] = {}
        """The view between two updates: who comes while one is under way has this, and then that."""
        self._queues: set[asyncio.Queue[Message]] = set()
        self._wanted = asyncio.Event()
        self._lock = asyncio.Lock()
        self._looked = self._fetched = 0.0

    @property
    def folder(self) -> Path | None:
        """Of the run, on this disk."""
        if not self._subject.run:
            return None
        return folder_of(self._subject.run) if is_url(self._subject.run) else Path(self._subject.run)

    def open(self) -> None:
        """RunView for the first time. Raises InputError for what is not there; a run of a fleet may not have begun."""
        if self._subject.read is not None:
            self._machines = Machines(*self._subject.read())
        if self._subject.run:
            try:
                self._bring()
                self._see()
            except InputError:
                if self._subject.read is None:
                    raise
        self._shown = self._sections()
        self._whole = self.view()

    def state(self) -> State:
        """As it was seen last."""
        return State(self._subject.run, self._look, self._machines, self._looked or time.time())

    def view(self) -> dict[str, Any]:
        """The whole, for who comes."""
        found = dict(self._shown)
        if (past := self._history) is not None:
            grows = ("losses", "speeds", "evaluations", "names", "columns", "told")
            found |= {name: list(getattr(past, name)) for name in grows}
        return found

    async def messages(self) -> AsyncIterator[Message]:
        """For one page: the whole, then what changes."""
        queue: asyncio.Queue[Message] = asyncio.Queue(WAITING)
        first = "view", _text(self._whole)
        self._queues.add(queue)
        self._wanted.set()
        try:
            yield first
            while True:
                try:
                    yield await asyncio.wait_for(queue.get(), BEAT)
                except TimeoutError:
                    yield "beat", ""
        finally:
            self._queues.discard(queue)
            if not self._queues:
                self._wanted.clear()

    async def fresh(self) -> State:
        """Seen just now, for who asks once."""
        if time.time() - self._looked > EVERY:
            await self._update(fresh=True)
        return self.state()

    async def watch(self) -> None:
        """RunView while somebody is there, until it is cancelled."""
        async with self.hosts:
            tasks = [asyncio.create_task(each) for each in (self._watch_run(), self._watch_fleet())]
            try:
                await asyncio.gather(*tasks)
            finally:
                for each in tasks:
                    each.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def older(self, at: int) -> dict[str, Any]:
        """Events before a place in their file."""
        past = self._history
        if past is None:
            return {"told": [], "at": 0}
        async with self._lock:
            told, begin = await asyncio.to_thread(past.older, at)
        return {"told": told, "at": begin}

    async def _watch_run(self) -> None:
        while True:
            await self._wanted.wait()
            await self._fetch()
            await self._update()
            await asyncio.sleep(EVERY)

    async def _watch_fleet(self) -> None:
        while self._subject.read is not None:
            if not self._wanted.is_set():
                self.hosts.rest()
                await self._wanted.wait()
            await self._read_machines()
            await self.hosts.follow()
            await asyncio.sleep(EVERY_FAR)

    async def _read_machines(self) -> None:
        assert self._subject.read is not None
        try:
            self._machines = Machines(*await asyncio.to_thread(self._subject.read))
            self._problems.pop("fleet", None)
        except (TpuswarmError, OSError) as error:
            self._problems["fleet"] = str(error)

    async def _fetch(self) -> None:
        """What a bucket has now; not asked again before it is time."""
        if not is_url(self._subject.run) or time.monotonic() - self._fetched < EVERY_FAR:
            return
        self._fetched = time.monotonic()
        try:
            await asyncio.to_thread(self._bring)
            self._problems.pop("bucket", None)
        except InputError:  # said by what reads its copy
            self._problems.pop("bucket", None)
        except Exception as error:  # noqa: BLE001 - what a cloud's library raises may pass, and ends no page
            said = str(error).strip().partition("\n")[0]
            self._problems["bucket"] = f"{self._subject.run} cannot be read now: {said or type(error).__name__}"

    async def _update(self, fresh: bool = False) -> None:
        if fresh and not self._wanted.is_set():  # nobody watches
            await self._fetch()
            if self._subject.read is not None:
                await self._read_machines()
        async with self._lock:
            news = await asyncio.to_thread(self._look_again)
            now = self._sections()
            changed = None if news is None else changes(self._shown, now) | news
            self._shown = now
            self._whole = self.view()
            if changed is None:
                self._publish("view", self._whole)
            else:
                self._publish("update", changed)

    def _look_again(self) -> dict[str, Any] | None:
        """What the run's files say that is new; None where they are other files now."""
        if not self._subject.run:
            self._looked = time.time()
            return {}
        try:
            again = self._see()
            past = self._history
            if past is None:
                return {}
            if again or (news := past.news()) is None:
                assert self.folder is not None
                self._history = History(self.folder, isinstance(self._look, RunView))
                return None
        except (TpuswarmError, OSError) as error:
            self._problems["run"] = str(error)
            return {}
        self._problems.pop("run", None)
        found = news._asdict() if news else {}
        return {name: value for name, value in found.items() if value} | ({"names": past.names} if news.columns else {})

    def _bring(self) -> None:
        if is_url(self._subject.run):
            bring(self._subject.run)

    def _see(self) -> bool:
        """RunView at the run; whether it is another one than before. Raises InputError."""
        folder = self.folder
        assert folder is not None
        self._looked = time.time()
        swarm = "swarm" in read_config(folder)
        self._look = read_run(folder) if swarm else status(folder)
        about = (folder / CONFIG).stat()
        before, self._born = self._born, (about.st_ino, about.st_mtime_ns)
        if self._history is None:
            self._history = History(folder, swarm)
        return before is not None and before != self._born

    def _sections(self) -> Sections:
        found = sections(self.state(), self.hosts.rows(self.state()))
        found["problems"] = sorted(self._problems.values())
        found["pictures"] = self._pictures()
        return found

    def _pictures(self) -> list[int]:
        folder = self.folder
        if folder is None:
            return []
        return sorted(int(each.stem) for each in (folder / FOLDER).glob(MADE))[-PICTURES:]

    def _publish(self, kind: str, data: dict[str, Any]) -> None:
        message = kind, _text(data)
        for queue in self._queues:
            if queue.full():  # a page that sleeps: it gets the whole when it wakes
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(("view", _text(self._whole)))
            else:
                queue.put_nowait(message)


def _text(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))
