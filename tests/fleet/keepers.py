"""Keepers on a model of a cloud, and what tests do with them."""

from dataclasses import replace
from pathlib import Path

from tests.fleet.cloud_model import Cloud
from tests.fleet.loop import desired, pool, vm
from tpuswarm.fleet.keeping.clock import Clock
from tpuswarm.fleet.keeping.document import (
    Document,
    DocumentStore,
)
from tpuswarm.fleet.keeping.history import History
from tpuswarm.fleet.keeping.keeper import Keeper, Tick

A, B = "us-central1-f", "us-central1-b"
WANTED = desired(pool("small", 2, (A, B)), pool("line", 1, (B,), "queued"), vm("head"))


def store(cloud: Cloud) -> DocumentStore:
    return DocumentStore(cloud.bucket("state"), "gpt2", "gs://state")


def begin(cloud: Cloud, wanted=WANTED) -> None:
    store(cloud).change(lambda _: Document("gpt2", "google", "model", wanted, wanted.zones))


def ask(cloud: Cloud, **what: object) -> None:
    store(cloud).change(lambda found: replace(found, desired=replace(found.desired, **what)))


def keeper(cloud: Cloud, folder: Path) -> Keeper:
    clock = Clock(wall=lambda: cloud.now, steady=lambda: cloud.now)
    return Keeper(cloud, store(cloud), History(folder / "history.db"), clock, threads=1)


def run(keeping: Keeper, cloud: Cloud, seconds: float, every: float = 10.0) -> Tick:
    end = cloud.now + seconds
    while True:
        tick = keeping.tick()
        cloud.advance(every)
        if cloud.now >= end:
            return tick


def ready(cloud: Cloud) -> list[str]:
    return sorted(each.name for each in cloud.there.values() if each.state == "ready")
