"""A change that a command has finished is in the document once, whatever the bucket does."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.fleet.loop import desired, pool, vm
from tests.swarm.bucket import bucket
from tpuswarm.cloud.errors import Changed, Unreachable
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.buckets import GoogleBucket
from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.fleet_state import WorkStatus
from tpuswarm.fleet.decide.jobs import Assignment, Job
from tpuswarm.fleet.decide.spending import Spending
from tpuswarm.fleet.store import document
from tpuswarm.fleet.store.document import Document, DocumentStore, LocalBucket, document_path
from tpuswarm.train.storage import bucket as client


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(document, "MAX_PAUSE_S", 0.01)
    monkeypatch.setattr("os.fsync", lambda file: None)


def event(text):
    def add(found):
        found = found or Document("gpt2", "google", "model", Desired("f", ()), ())
        return replace(found, events=(*found.events, Event(0.0, "pool", "", "note", text)))

    return add


def test_router_of_an_older_document_still_forwards_to_ssh(tmp_path):
    store = DocumentStore(LocalBucket(tmp_path), "gpt2", "here")
    store.save(Document("gpt2", "google", "model", desired(pool(), vm("door", forwards=(22,))), ()))
    file = tmp_path / document_path("gpt2")
    text = file.read_text().replace('"forwards": []', '"routes": false')
    file.write_text(re.sub(r'"forwards": \[\s*22\s*\]', '"routes": true', text))
    assert '"routes": true' in file.read_text() and "forwards" not in file.read_text()
    assert [pool.forwards for pool in store.load().desired.pools] == [(), (22,)]


class LosesAnswers(LocalBucket):
    """Writes, or does not, and says neither; now and then somebody else writes next."""

    def __init__(self, folder, seed):
        super().__init__(folder)
        self.random = random.Random(seed)

    def write(self, path, data, generation):
        fault = self.random.random()
        if fault < 0.2:
            raise Unreachable("not sent")
        written = super().write(path, data, generation)
        if fault < 0.5:
            if fault < 0.35:
                DocumentStore(LocalBucket(self._folder), "gpt2", "here").change(event("of another"))
            raise Unreachable("the answer is lost")
        return written


def test_change_whose_answer_is_lost_is_made_once(fast, tmp_path):
    for seed in range(20):
        folder = tmp_path / f"{seed}"
        store = DocumentStore(LosesAnswers(folder, seed), "gpt2", "here")
        for number in range(10):
            store.change(event(f"{number}"))
        texts = [found.text for found in store.load().events if found.text != "of another"]
        assert texts == [f"{number}" for number in range(10)], f"seed {seed}"


def test_sixteen_writers_at_once_all_come_through(fast, tmp_path):
    def write(number):
        store = DocumentStore(LocalBucket(tmp_path), "gpt2", "here")
        for again in range(5):
            store.change(event(f"{number}.{again}"))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(16)))
    found = DocumentStore(LocalBucket(tmp_path), "gpt2", "here").load().events
    assert sorted(event.text for event in found) == sorted(f"{n}.{again}" for n in range(16) for again in range(5))


def test_bucket_that_stays_silent_is_given_up(fast, tmp_path, monkeypatch):
    monkeypatch.setattr(document, "CHANGE_TIMEOUT_S", 0.1)
    store = DocumentStore(LocalBucket(tmp_path), "gpt2", "here")
    for error in (Unreachable("silent"), Changed("others are faster")):
        monkeypatch.setattr(store, "save", lambda document, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            store.change(event("never"))


def test_change_in_a_bucket_that_lies_is_made_once(fast, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "MIN_PAUSE_S", 0.01)
    monkeypatch.setattr(client, "MAX_PAUSE_S", 0.02)
    with bucket("state", tmp_path) as server:
        access = Access("p", Endpoints("", server.endpoint, "token"))
        server.random_faults = ("408", "429", "503", "reset", "lose the answer", "corrupt")

        def write(number):
            store = DocumentStore(GoogleBucket(access, "state"), "gpt2", "here")
            for again in range(10):
                store.change(event(f"{number}.{again}"))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(write, range(2)))
        server.random_faults = ()
        found = DocumentStore(GoogleBucket(access, "state"), "gpt2", "here").load()
    assert sorted(event.text for event in found.events) == sorted(
        f"{n}.{again}" for n in range(2) for again in range(10)
    )


def test_stored_names_stay_when_the_code_is_renamed(tmp_path):
    store = DocumentStore(LocalBucket(tmp_path), "gpt2", "here")
    job, work = Job("a", "all", "true", "never", (Assignment("small"),)), WorkStatus(unusable={"m": (1.0, "full")})
    new = Document("gpt2", "google", "p", Desired("f", ()), (), spending=Spending(at=2.0), work=work, jobs=(job,))
    store.change(lambda _: new)
    stored = json.loads(LocalBucket(tmp_path).read(document_path("gpt2")).data)
    assert stored["jobs"][0]["seats"] and stored["work"]["spoilt"] and stored["ledger"]["at"] == 2.0
    assert replace(store.load(), commands=()) == new
