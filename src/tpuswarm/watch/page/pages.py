"""The page that a command opens, and a page for each other run that its viewers choose from the list."""

import asyncio
from contextlib import suppress

from tpuswarm.errors import InputError
from tpuswarm.train.run.listing import list_runs
from tpuswarm.watch.page.live import LivePage, Subject


class Pages:
    """Pages by the name of their run, in one event loop."""

    def __init__(self, first: LivePage):
        self.first = first
        self._others: dict[str, LivePage] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._lock = asyncio.Lock()

    async def find(self, run: str) -> LivePage:
        """Return the page of a run in the list; without a name, the first page. Raise InputError for other names."""
        if not run:
            return self.first
        async with self._lock:
            if run not in self._others:
                self._others[run] = await self._open(run)
            return self._others[run]

    async def _open(self, run: str) -> LivePage:
        runs = self.first.subject.runs
        folders = await asyncio.to_thread(list_runs, runs) if runs else []
        folder = next((folder for folder in folders if folder.name == run), None)
        if folder is None:
            raise InputError(f"there is no run {run} in the list")
        page = LivePage(Subject(str(folder), runs))
        await asyncio.to_thread(page.open)
        self._tasks.append(asyncio.create_task(page.watch()))
        return page

    async def watch(self) -> None:
        """Read while pages are open, until cancelled."""
        try:
            await self.first.watch()
        finally:
            for task in self._tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
