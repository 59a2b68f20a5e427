"""A page follows its run and reports temporary failures."""

import asyncio
import json

import pytest

from tests.watch.fake_run import FakeRun, make_plain_run
from tpuswarm.watch.page import live as module
from tpuswarm.watch.page.live import LivePage, Subject

URL = "gs://bucket/run"


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A run in a bucket; the next fetch raises the last of `errors`."""
    run = FakeRun(tmp_path / "run", 2, 100)
    run.grow(3)
    run.errors, run.fetches = [], 0

    def fetch(url: str) -> None:
        run.fetches += 1
        if run.errors:
            raise run.errors.pop()

    monkeypatch.setattr(module, "download_run", fetch)
    monkeypatch.setattr(module, "copy_folder", lambda url: run.folder)
    return run


async def until(messages, holds) -> dict:
    """Return the first message for which `holds` is true."""
    async for _, data in messages:
        message = json.loads(data or "{}")
        if holds(message):
            return message
    raise AssertionError("the messages ended")


def test_bucket_that_fails_once_is_reported_and_still_followed(bucket, monkeypatch):
    monkeypatch.setattr(module, "REFRESH_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "REMOTE_REFRESH_INTERVAL_S", 0.01)

    async def work() -> None:
        live = LivePage(Subject(URL))
        live.open()
        bucket.errors.append(ConnectionResetError("the library gave up"))
        watching = asyncio.create_task(live.watch())
        messages = live.messages()
        printed = await until(messages, lambda item: item.get("problems"))
        assert printed["problems"] == [f"{URL} cannot be read now: the library gave up"]
        await until(messages, lambda item: item.get("problems") == [])
        bucket.grow(1)
        news = await until(messages, lambda item: item.get("columns"))
        assert [column[0] for column in news["columns"]] == [4] and not watching.done()
        await messages.aclose()
        watching.cancel()

    asyncio.run(asyncio.wait_for(work(), 240))


def test_requests_do_not_each_read_the_bucket(bucket, monkeypatch):
    monkeypatch.setattr(module, "REFRESH_INTERVAL_S", 0.0)

    async def work() -> None:
        live = LivePage(Subject(URL))
        live.open()
        bucket.grow(2)
        assert (await live.fresh()).swarm.status.version == 5
        for _ in range(3):
            await live.fresh()
        assert bucket.fetches == 2, "one at the start, one for the first request"

    asyncio.run(work())


def test_sleeping_page_does_not_slow_the_others(bucket, monkeypatch):
    monkeypatch.setattr(module, "MAX_QUEUED_UPDATES", 1)

    async def work() -> None:
        live = LivePage(Subject(URL))
        live.open()
        pages = [live.messages() for _ in range(9)]
        for page in pages:
            assert (await anext(page))[0] == "view"
        for _ in range(2):
            bucket.grow(1)
            await live._update()
            assert [(await anext(page))[0] for page in pages[1:]] == ["update"] * 8
        assert (await anext(pages[0]))[0] == "view", "a page that missed updates gets the whole view"

    asyncio.run(asyncio.wait_for(work(), 240))


def test_run_that_begins_after_its_page_is_shown_from_its_first_row(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "REMOTE_REFRESH_INTERVAL_S", 0.0)

    async def work() -> None:
        live = LivePage(Subject("", tmp_path / "runs", is_newest=True))
        live.open()
        messages = live.messages()
        await anext(messages)
        make_plain_run(tmp_path / "runs" / "one", 20)
        await live._update()
        found = await until(messages, lambda item: item.get("losses"))
        assert len(found["losses"]) == 20 and found["events"][0]

    asyncio.run(asyncio.wait_for(work(), 240))
