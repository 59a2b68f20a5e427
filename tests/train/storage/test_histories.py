"""Play random histories of computers that own, read and lose one run; the bucket loses, delays and repeats requests.

The code is the product's but for the client: requests, sleeps and clocks are those of a `World`, in which one process
runs at a time and any of them may be suspended or killed at each request.
"""

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tpuswarm.errors import InputError
from tpuswarm.train.process import atomic
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.storage import copy, record
from tpuswarm.train.storage.bucket import Listed, Unreachable, Versioned
from tpuswarm.train.storage.copy import RunCopy
from tpuswarm.train.storage.folders import ORIGIN, ROWS
from tpuswarm.train.storage.record import RECORD, Lost, OwnedRecord, Record, objects_of

URL = "gs://bucket/run"


class Killed(BaseException):
    """The process ends here, as by SIGKILL."""


@dataclass
class Stored:
    data: bytes
    generation: int
    at: float


@dataclass
class Process:
    """One life of a program on a computer."""

    name: str
    folder: Path
    work: Callable[["Process"], None]
    wakes: float = 0.0
    cut_off_until: float = 0.0
    ended: bool = False
    turn: threading.Event = field(default_factory=threading.Event)


class World:
    """Objects, clock and processes."""

    def __init__(self, seed: int, faults: bool = True):
        self.random, self.faults = random.Random(seed), faults
        self.now = 1000.0
        self.objects: dict[str, Stored] = {}
        self.late: list[tuple[Process | None, Callable[[], None]]] = []
        self.history: list[Record] = []
        self.seen: list[tuple[list[str], bytes]] = []
        """The rows and the configuration of each record in the history."""
        self.changed_by: str | None = None
        """The computer whose process changed the files last."""
        self.changed_at_take: dict[str, str | None] = {}
        """`changed_by` when each computer last acquired the run."""
        self.processes: list[Process] = []
        self.current: Process | None = None
        self.failure: BaseException | None = None
        self._yielded = threading.Event()
        self._generation = 0

    # The scheduler.

    def start(self, name: str, folder: Path, work: Callable[[Process], None]) -> None:
        process = Process(name, folder, work, wakes=self.now)
        self.processes.append(process)
        threading.Thread(target=self._live, args=(process,), daemon=True).start()

    def run(self) -> None:
        """Let processes take turns until all have ended."""
        while living := [process for process in self.processes if not process.ended]:
            ready = [process for process in living if process.wakes <= self.now]
            if not ready:
                self.now = min(process.wakes for process in living)
                continue
            self.current = self.random.choice(ready)
            self._yielded.clear()
            self.current.turn.set()
            assert self._yielded.wait(60)
            if self.failure:
                raise self.failure
            if self.late and self.random.random() < 0.1:
                self.current, apply = self.late.pop(self.random.randrange(len(self.late)))
                apply()

    def _live(self, process: Process) -> None:
        process.turn.wait()
        process.turn.clear()
        try:
            process.work(process)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  # of an invariant, or of the code
            self.failure = error
        process.ended = True
        self._yielded.set()

    def sleep(self, seconds: float) -> None:
        process = self.current
        assert process
        process.wakes = self.now + seconds
        self._yielded.set()
        process.turn.wait()
        process.turn.clear()

    # The bucket.

    def request(self, apply: Callable[[], Any]) -> Any:
        """Carry out a request, with what may go wrong around it."""
        self.sleep(self.random.choice([0.01, 0.1, 1.0]))
        fault = self.random.random() if self.faults else 1.0
        process = self.current
        if self.faults and self.random.random() < 0.003:
            process.cut_off_until = self.now + self.random.uniform(10, 600)
        if self.now < process.cut_off_until:
            raise Unreachable("cut off")
        if fault < 0.01:
            raise Killed
        if fault < 0.03:  # the computer sleeps
            self.sleep(self.random.uniform(1, 200))
        elif fault < 0.05:
            raise Unreachable("not sent")
        elif fault < 0.07:
            self.late.append((self.current, apply))
            raise Unreachable("late")
        answer = apply()
        if 0.07 < fault < 0.08:
            raise Killed
        if 0.08 < fault < 0.12:
            raise Unreachable("the answer is lost")
        return answer

    def write(self, name: str, data: bytes, generation: int | None) -> int | None:
        there = self.objects.get(name)
        if generation is not None and (there.generation if there else 0) != generation:
            return None
        self._generation += 1
        if name == RECORD:
            self._check(record.decode(data))
        else:
            assert there is None, f"{name} is written twice"
        self.objects[name] = Stored(data, self._generation, self.now)
        return self._generation

    def delete(self, name: str) -> None:
        if name in self.objects:
            assert not self.history or name not in objects_of(self.history[-1].files.values()), f"{name} is in use"
            del self.objects[name]

    def _check(self, new: Record) -> None:
        """Whoever changes the record owns the run; all that it names is there, and nothing is lost or there twice."""
        old = self.history[-1] if self.history else None
        if old:
            assert new.run == old.run
            assert (new.epoch, new.owner.id) == (old.epoch, old.owner.id) or new.epoch == old.epoch + 1
            if new.epoch != old.epoch:
                assert new.files == old.files
            elif new.files != old.files:
                self.changed_by = self.current.name
        rows = [json.loads(line)["id"] for line in self._content(new, ROWS).splitlines()]
        if self.seen:
            assert rows[: len(self.seen[-1][0])] == self.seen[-1][0], "rows are lost"
        assert len(set(rows)) == len(rows), "rows are there twice"
        for file in new.files.values():
            for part in file.parts:
                assert len(self.objects[part.object].data) == part.size
        if not old or new.epoch != old.epoch:
            self.changed_at_take[self.current.name] = self.changed_by
        self.history.append(new)
        self.seen.append((rows, self._content(new, "config.toml")))

    def _content(self, found: Record, path: str) -> bytes:
        file = found.files.get(path)
        return b"".join(self.objects[part.object].data for part in file.parts) if file else b""


class FakeBucket:
    """A process's client."""

    def __init__(self, world: World):
        self._world, self.url, self.progress, self.gave_up = world, URL, 0, False

    def create(self, name: str, data: Any) -> bool:
        return self._world.request(lambda: self._world.write(name, data, 0)) is not None

    def swap(self, name: str, data: bytes, generation: int, retry_for_s: float | None = None) -> int | None:
        return self._world.request(lambda: self._world.write(name, data, generation))

    def put_file(self, name: str, path: Path) -> int:
        data = path.read_bytes()
        self._world.request(lambda: self._world.write(name, data, None))
        return len(data)

    def read(self, name: str) -> bytes:
        found = self._world.request(lambda: self._world.objects.get(name))
        if found is None:
            raise FileNotFoundError(name)
        return found.data

    def read_versioned(self, name: str, retry_for_s: float | None = None) -> Versioned | None:
        found = self._world.request(lambda: self._world.objects.get(name))
        return Versioned(found.data, found.generation) if found else None

    def age_s(self, name: str) -> float:
        found = self._world.request(lambda: self._world.objects.get(name))
        if found is None:
            raise FileNotFoundError(name)
        return self._world.now - found.at

    def fetch(self, name: str, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(self.read(name))

    def listed(self, prefix: str) -> dict[str, Listed]:
        world = self._world
        return world.request(
            lambda: {
                name: Listed(len(found.data), found.at)
                for name, found in world.objects.items()
                if name.startswith(prefix)
            }
        )

    def delete(self, name: str) -> None:
        self._world.request(lambda: self._world.delete(name))


class Serial:
    """A pool that works in the thread that asks."""

    def __init__(self, workers: int):
        pass

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        pass

    map = staticmethod(map)


@contextmanager
def product_in(world: World) -> Iterator[None]:
    """Let the product's code run in a world."""
    with (
        patch.object(copy, "Bucket", lambda url: FakeBucket(world)),
        patch.object(copy, "ThreadPoolExecutor", Serial),
        patch.object(record, "boot_time", lambda: world.now),
        patch.object(record, "time", SimpleNamespace(sleep=world.sleep)),
        patch.object(record, "is_process_alive", lambda computer, pid: None),
        patch.object(atomic.os, "fsync", lambda file: None),  # no computer loses power here
    ):
        yield


def owner(world: World, pushes: int) -> Callable[[Process], None]:
    """A program that trains: it takes the run, appends rows, saves checkpoints, and is resumed where it loses it."""

    def work(process: Process) -> None:
        write_atomically(process.folder / ORIGIN, URL)
        left = pushes
        while left:
            try:
                run = RunCopy(process.folder)
                owned = OwnedRecord(run.bucket)
                before = _rows(process)
                run.acquire(owned)
                if world.changed_at_take[process.name] in (None, process.name):
                    assert _rows(process)[: len(before)] == before, "rows of this disk are lost"
                while left:
                    left -= 1
                    run.sweep(owned)
                    _train(world, process)
                    _until_answered(world, partial(run.push, owned))
                    world.sleep(world.random.choice([1, 10, 60]))
                    _until_answered(world, owned.renew)
                owned.release()
            except (InputError, Unreachable, Lost, Killed):  # the user repeats the command
                world.sleep(world.random.uniform(0, 60))

    return work


def _rows(process: Process) -> list[str]:
    path = process.folder / ROWS
    return path.read_text().splitlines() if path.exists() else []


def _until_answered(world: World, call: Callable[[], None]) -> None:
    for _ in range(20):
        try:
            return call()
        except Lost:
            raise
        except Unreachable:
            world.sleep(5.0)
    raise Unreachable("for too long")


def _train(world: World, process: Process) -> None:
    for _ in range(world.random.choice([0, 1, 3])):
        with (process.folder / ROWS).open("a") as file:
            file.write(json.dumps({"id": f"{process.name}-{world.random.getrandbits(64):x}"}) + "\n")
    steps = sorted((process.folder / "checkpoints").glob("[0-9]*"))
    if world.random.random() < 0.5:
        step = process.folder / "checkpoints" / f"{int(steps[-1].name) + 1 if steps else 0:08d}"
        step.mkdir(parents=True)
        (step / "arrays").write_bytes(bytes(world.random.randrange(1, 9)))
        (step / "manifest.json").write_text("{}")
        for path in steps[:-1]:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    (process.folder / "config.toml").write_text(f"at = {world.now}")


def reader(world: World, looks: int) -> Callable[[Process], None]:
    """A program that reads the run; each copy equals the content of some record."""

    def work(process: Process) -> None:
        write_atomically(process.folder / ORIGIN, URL)
        config = process.folder / "config.toml"
        for _ in range(looks):
            world.sleep(world.random.uniform(0, 60))
            try:
                whole = world.random.random() < 0.5
                if not RunCopy(process.folder).pull(whole):
                    continue
            except Unreachable:
                continue
            contents = [path.read_bytes() if path.exists() else b"" for path in (process.folder / ROWS, config)]
            rows = [json.loads(line)["id"] for line in contents[0].splitlines()]
            assert (rows, contents[1]) in world.seen, "no record was like this"
            for manifest in process.folder.glob("checkpoints/*/manifest.json"):
                assert manifest.with_name("arrays").exists()

    return work


def play(seed: int, folder: Path, faults: bool = True) -> World:
    """Play one history; raises AssertionError where an invariant breaks."""
    world = World(seed, faults)
    count = world.random.choice([2, 2, 3])
    with product_in(world):
        for number in range(count):
            computer = folder / f"c{number}"
            computer.mkdir()
            world.start(f"p{number}", computer, owner(world, 6))
        (folder / "reader").mkdir()
        world.start("reader", folder / "reader", reader(world, 6))
        world.run()
    return world


pytestmark = pytest.mark.slow
HISTORIES = 200


@pytest.mark.parametrize("part", range(4))
def test_run_has_one_owner_and_loses_nothing(part, tmp_path):
    owners = 0
    for seed in range(part, HISTORIES, 4):
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        try:
            owners += max((found.epoch for found in play(seed, folder).history), default=0)
        except BaseException as error:
            error.add_note(f"history {seed}")
            raise
    assert owners > HISTORIES / 4, "most histories have a takeover"
