"""Set up machines beside a keeper, lead routers to them, and carry out jobs, whatever goes wrong."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import asyncssh
import pytest

from tests.fleet.loop import ZONE, desired, machine, pool, vm
from tpuswarm.cloud.errors import Unreachable
from tpuswarm.cloud.protocol import Listing, Machine, Worker
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet.decide.jobs import Assignment, Job, end_job
from tpuswarm.fleet.hosts import routers, setup
from tpuswarm.fleet.hosts.setup import BootState, Preparer, PrepareResult
from tpuswarm.fleet.keeper import job_runner
from tpuswarm.fleet.keeper.job_runner import JobRunner, JobThread
from tpuswarm.fleet.store.document import Document, DocumentStore, MemoryBucket
from tpuswarm.remote.setup.step import FileUnavailable

FULL = "b/0: packages: no space left on device"


def test_job_thread_survives_errors_and_is_restarted_when_it_ends(tmp_path, monkeypatch):
    key = tmp_path / "key"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(key))
    rounds, logged, enough = [], [], threading.Event()

    async def carry_out(connections, listing, now, seen):
        rounds.append(threading.current_thread())
        if len(rounds) in (2, 3):
            raise FileNotFoundError("objects/abc")  # a `sync` has just deleted it
        if len(rounds) == 4:
            raise SystemExit
        if len(rounds) == 6:
            enough.set()
        return None, True

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(job_runner, "BUSY_INTERVAL_S", 0.1)
    carrying = JobThread(lambda: SimpleNamespace(key=key, run_once=carry_out, interval_s=0.0), logged.append)
    while not enough.wait(0.01):
        carrying.update(Listing((), frozenset()), SimpleNamespace(jobs=[1]))
    carrying.stop()
    assert logged == ["jobs: FileNotFoundError: objects/abc; trying again"]
    assert len(set(rounds)) == 2


class Setup:
    """Set-ups of machines that the test finishes, beside a fleet with a [setup] table."""

    def __init__(self, monkeypatch):
        self.table = "one"
        self.started: list[str] = []
        self.running: dict[str, asyncio.Future[PrepareResult]] = {}
        stored = SimpleNamespace(table=lambda: SimpleNamespace(model_dump_json=lambda: self.table))
        monkeypatch.setattr(setup, "prepare_machine", self._prepare)
        monkeypatch.setattr(setup, "SavedSetup", lambda fleet: stored)
        monkeypatch.setattr(setup, "RETRY_S", -1.0)
        self.preparing = Preparer(SimpleNamespace(fleet=None))

    async def _prepare(self, routes, name: str) -> PrepareResult:
        self.started.append(name)
        self.running[name] = asyncio.get_running_loop().create_future()
        return await self.running[name]

    async def check(self, name: str = "a", runs: int | None = 0, created: float = 1.0, answers: str = "a") -> str:
        """Return why a machine is not ready; empty: it is."""
        found = self.preparing.update({name: BootState(created, runs)}, answers).get(name, "")
        await asyncio.sleep(0)  # what was started runs until it waits
        return found

    async def finish(self, name: str, error: Exception | None = None) -> None:
        if isinstance(error, InputError):
            self.running.pop(name).set_exception(error)
        else:
            self.running.pop(name).set_result(PrepareResult({f"{name}/0": error} if error else {}))
        for _ in range(3):
            await asyncio.sleep(0)

    async def prepare(self, name: str, error: Exception | None, answers: str, tries: int) -> None:
        for _ in range(tries):
            await self.check(name, answers=answers)
            await self.finish(name, error)
            await self.check(name, answers=answers)


@pytest.fixture
def setups(monkeypatch) -> Setup:
    return Setup(monkeypatch)


@pytest.mark.parametrize(
    ("others", "answers", "error", "tries", "is_bad"),
    [
        ("a", "a", RunFailed(FULL), 2, True),
        ("a", "a", RunFailed(FULL), 1, False),
        ("", "a", RunFailed(FULL), 3, False),  # no machine can be set up
        ("a", "", RunFailed(FULL), 3, False),  # the network to all of them is down
        ("a", "b", RunFailed(FULL), 3, False),
        ("a", "a", InputError("A_TOKEN is not set"), 3, False),  # the keeper can set up none
        ("a", "a", FileUnavailable("uv cannot be downloaded here either"), 3, False),  # nor this one
    ],
)
def test_machine_that_fails_setup_twice_is_bad_where_others_succeed(setups, others, answers, error, tries, is_bad):
    async def scenario() -> None:
        for name in others:
            await setups.prepare(name, None, answers, 1)
        await setups.prepare("b", error, answers, tries)
        created = {"a": 1.0, "b": 1.0}
        assert setups.preparing.unusable(created) == ({"b": (1.0, FULL)} if is_bad else {})
        assert setups.preparing.unusable({**created, "b": 2.0}) == {}, "another machine of that name"
        setups.table = "two"
        await setups.prepare("b", error, answers, 2)
        assert setups.preparing.unusable(created) == {}, "the new [setup] may be wrong"

    asyncio.run(scenario())


def test_machine_is_set_up_once_at_a_time_and_again_after_a_reboot(setups):
    async def scenario() -> None:
        for runs in (3, None, 3, 4):
            assert await setups.check(runs=runs) == "a is being set up"
        assert setups.started == ["a"]
        await setups.finish("a")
        assert await setups.check(runs=None) == "", "silence is no reboot"
        assert await setups.check(runs=4) == "a is being set up"
        assert setups.started == ["a", "a"]
        await setups.finish("a")
        assert await setups.check(runs=4) == ""

    asyncio.run(scenario())


def test_failed_setup_is_retried_until_it_succeeds(setups):
    async def scenario() -> None:
        assert await setups.check() == "a is being set up"
        await setups.finish("a", RunFailed("a/0: packages: no network"))
        for _ in range(3):  # the retry may take longer than the pause before it
            assert await setups.check() == "a/0: packages: no network"
        await setups.finish("a")
        assert await setups.check() == "" and setups.started == ["a", "a"]

    asyncio.run(scenario())


def with_address(name: str, address: str, pool: str = "small") -> Machine:
    kind = "vm" if pool == "door" else "tpu"
    return replace(machine(name, pool=pool, kind=kind), workers=(Worker(address, None),))


ROUTED = desired(pool(count=2), vm("door", forwards=(22,)))
DOOR = with_address("gpt2-door", "10.0.0.9", "door")
ZERO, ONE = with_address("v2-usc1f-0", "10.0.0.1"), with_address("v2-usc1f-1", "10.0.0.2")


@pytest.fixture
def routing(monkeypatch):
    """Return how often the routers were updated, after these machines were listed."""
    logged: list[str] = []
    updates: list[object] = []
    errors: list[Exception] = []

    async def route(routes, hosts):
        updates.append(hosts)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(routers, "configure_routers", route)
    monkeypatch.setattr(routers, "router_hosts", lambda routes: ["gpt2-door/0"])
    monkeypatch.setattr(routers, "RETRY_S", -1.0)
    made = routers.RouterUpdater(lambda: None, logged.append)

    def observe(*machines: Machine, desired=ROUTED) -> int:
        made.update(desired, Listing(machines, frozenset()))
        for thread in threading.enumerate():
            if thread.name == "routers":
                thread.join()
        return len(updates)

    observe.logged, observe.errors = logged, errors
    return observe


def test_routers_are_updated_for_new_machines_but_not_for_lost_ones(routing):
    assert routing(ZERO) == 0, "its router is not ready"
    assert routing(DOOR) == 0, "no machine to route to"
    assert routing(DOOR, ZERO) == routing(DOOR, ZERO) == 1
    assert routing(DOOR, ZERO, ONE) == 2
    assert routing(DOOR, ONE) == 2, "the lost one may come back"
    moved = with_address("v2-usc1f-0", "10.0.0.7")
    assert routing(DOOR, moved, ONE) == 3, "another machine of that name"
    assert routing(replace(DOOR, created=2.0), moved, ONE) == 4, "a new router"
    assert routing(DOOR, ZERO, desired=replace(ROUTED, down="requested")) == 4
    assert routing(ZERO, ONE, desired=replace(ROUTED, pools=ROUTED.pools[:1])) == 4


def test_router_with_more_workers_than_ports_is_refused():
    forwards = (22, 8470, 8888)
    machines = [with_address(f"v2-usc1f-{number}", f"10.0.{number // 250}.{number % 250}") for number in range(14_600)]
    with pytest.raises(InputError, match="43,536 ports, too few for 3 of each of 14,600 workers"):
        routers.router_file(desired(pool(count=1), vm("door", forwards=forwards)), machines)
    file, labels = routers.router_file(desired(pool(count=1), vm("door", forwards=forwards)), machines[:1001])
    assert labels[23_000] == "v2-usc1f-1000/0, port 22" and labels[24_000] == "v2-usc1f-0/0, port 8470"
    assert len(file.targets) == 3 * 1001


def test_failed_router_update_is_retried(routing):
    routing.errors.append(Unreachable("gpt2-door/0 does not answer"))
    assert routing(DOOR, ZERO) == 1 and routing.logged == ["the routers: gpt2-door/0 does not answer; trying again"]
    assert routing(DOOR, ZERO) == routing(DOOR, ZERO) == 2


def test_head_that_failed_for_good_starts_on_a_new_machine_but_not_after_the_fleet_came_down(tmp_path):
    failed = Assignment("small", "a", 1.0, phase="failed", run=3, failed=3, error="x", same_errors=3)
    head = Job("head", "small", "train", "always", (failed,))

    class NoRoutes:
        key = tmp_path

        def accepts_own_key(self, document):
            return True

        def route_to(self, snapshot, targets):
            raise Unreachable("no machine answers")

        def refresh_ssh_config(self, snapshot):
            pass

    def phase(job: Job, created: float) -> str:
        store = DocumentStore(MemoryBucket(), "gpt2", "here")
        store.save(Document("gpt2", "google", "model", desired(pool(count=1)), (ZONE,), jobs=(job,)))
        listing = Listing((machine("a", created=created),), frozenset())
        asyncio.run(JobRunner(NoRoutes(), store).run_once(None, listing, 1_000.0, may_start=False))
        return store.load().jobs[0].assignments[0].phase

    assert (phase(head, 1.0), phase(head, 2.0), phase(end_job(head), 2.0)) == ("failed", "waiting", "stopped")
