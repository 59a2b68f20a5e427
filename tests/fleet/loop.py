"""Build fleets, and run them on a fake cloud: as a bare loop of plans, or under a keeper."""

from dataclasses import dataclass, replace
from pathlib import Path

from tests.fleet.fake_cloud import FakeCloud
from tpuswarm.catalog import Api
from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, How, Listing, Machine, TpuSpec, VmSpec, Worker
from tpuswarm.fleet.decide import actions
from tpuswarm.fleet.decide.choose_actions import make_plan
from tpuswarm.fleet.decide.desired import Desired, PoolSpec
from tpuswarm.fleet.decide.fleet_state import FleetState, Observed, WorkStatus
from tpuswarm.fleet.decide.limits import Limits, is_billable
from tpuswarm.fleet.decide.money import machine_price
from tpuswarm.fleet.decide.observe import observe
from tpuswarm.fleet.decide.traffic import Traffic
from tpuswarm.fleet.keeper.clock import Clock
from tpuswarm.fleet.keeper.keeper import Keeper, Tick
from tpuswarm.fleet.store.document import Document, DocumentStore
from tpuswarm.fleet.store.history import History

FLEET = "gpt2-abc123"
A, B, C, EUROPE = "us-central1-f", "us-central1-b", "us-central1-c", "europe-west4-a"
ZONE = A


def pool(
    name: str = "small", count: int = 1, zones: tuple[str, ...] = (ZONE,), how: How = "spot", type_: str = "v2-8",
    wait_s: float | None = None, api: Api = "tpu",
) -> PoolSpec:  # fmt: skip
    spec = TpuSpec("", zones[0], type_, how, FLEET, name, "tpu-ubuntu2204-base", api)
    return PoolSpec(name, spec, zones, count, wait_s)


def vm(name: str, forwards: tuple[int, ...] = ()) -> PoolSpec:
    spec = VmSpec(f"gpt2-{name}", ZONE, "n2-highmem-8", FLEET, name, "ubuntu-os-cloud/ubuntu-2404-lts-amd64", 100)
    return PoolSpec(name, spec, (ZONE,), 1, forwards=forwards)


def desired(*pools: PoolSpec, **fields: object) -> Desired:
    return replace(Desired(FLEET, pools, paid=True), **fields)


def machine(
    name: str, state="ready", workers: int = 2, created: float = 1.0, pool: str = "small", kind="tpu", type_="v2-8"
) -> Machine:
    return Machine(
        name, ZONE, kind, type_, state, state.upper(), how="spot", created=created,
        workers=tuple(Worker(f"10.0.0.{number}", None) for number in range(workers)),
        labels={FLEET_LABEL: FLEET, POOL_LABEL: pool},
    )  # fmt: skip


@dataclass
class Loop:
    """Look, remember, plan and act in memory, every few seconds of the cloud's time."""

    cloud: FakeCloud
    desired: Desired
    every: float = 10.0

    def __post_init__(self) -> None:
        self.state, self.work = FleetState(), WorkStatus()
        self.answers: list[actions.CloudAnswer] = []
        self.actions: list[actions.Action] = []
        self.times: list[float] = []
        """When each action happened, in seconds since the start."""
        self.events: list[actions.Event] = []
        self.busy: frozenset[str] = frozenset()
        self.traffic = Traffic()
        self.waits: tuple[actions.Wait, ...] = ()
        self.listing = Listing((), frozenset())
        self.spent, self.started, self.clock_offset_s = 0.0, self.cloud.now, 0.0

    @property
    def now(self) -> float:
        return self.cloud.now + self.clock_offset_s

    def observed(self) -> Observed:
        return Observed(self.listing, self.state, self.spent, self.work, self.traffic, self.busy)

    def run(self, seconds: float) -> None:
        end = self.cloud.now + seconds
        while self.cloud.now <= end:
            self.tick()
            self.advance(self.every)

    def advance(self, seconds: float) -> None:
        """Let time pass, and charge what the machines really cost."""
        existing = tuple(self.cloud.existing.values())
        limits = Limits(self.desired, Observed(Listing(existing, frozenset()), FleetState()), (), self.now)
        for found in existing:
            is_ours = found.fleet == self.desired.fleet and found.state != "creating"
            if is_ours and is_billable(found) and not limits.is_free(found):
                self.spent += (machine_price(found) or 0.0) * seconds / 3600
        self.cloud.advance(seconds)

    def jump_clock(self, seconds: float) -> None:
        self.clock_offset_s += seconds
        self.state = self.state.shifted(seconds)

    def change(self, **fields: object) -> None:
        self.desired = replace(self.desired, revision=self.desired.revision + 1, **fields)

    def tick(self) -> None:
        for key, request in self.state.requests.items():
            if request.operation:
                done, error = self.cloud.outcome(request.operation)
                if done:
                    self.answers.append(actions.CreateResult(key, error))
        self.listing = self.cloud.machines(self.desired.zones)
        self.state, events = observe(self.state, self.desired, self.listing, self.answers, self.now)
        self.events += events
        self.answers = []
        found = make_plan(self.desired, self.observed(), self.now)
        if found.end:
            self.desired = replace(self.desired, down=found.end)
            found = make_plan(self.desired, self.observed(), self.now)
        self.waits = found.waits
        for action in found.actions:
            self.act(action)

    def act(self, action: actions.Action) -> None:
        self.actions.append(action)
        self.times.append(self.cloud.now - self.started)
        try:
            match action:
                case actions.Create(spec):
                    operation = self.cloud.create(spec)
                case actions.Delete(found):
                    operation = self.cloud.delete(found)
                case actions.Grow(found, disk_gib):
                    operation = self.cloud.grow_disk(found, disk_gib)
                case actions.Stop(found):
                    operation = self.cloud.stop(found)
                case _:
                    operation = self.cloud.start(action.machine)
        except CloudError as error:
            self.answers.append(actions.ActionResult(action, None, error))
        else:
            self.answers.append(actions.ActionResult(action, operation, None))


def started(cloud: FakeCloud, *pools: PoolSpec, seconds: float = 600.0, every: float = 10.0, **fields: object) -> Loop:
    loop = Loop(cloud, desired(*pools, **fields), every)
    loop.run(seconds)
    return loop


MANAGED_FLEET = desired(pool("small", 2, (A, B)), pool("line", 1, (B,), "queued"), vm("head"))


class ManagedFleet:
    """A fleet whose document lies in a bucket of a fake cloud, for keepers on one or several computers."""

    def __init__(self, folder: Path, wanted: Desired = MANAGED_FLEET, **fields: object):
        self.cloud, self.folder, self.clock_offset_s = FakeCloud(), folder, 0.0
        self.clock = Clock(wall=lambda: self.cloud.now + self.clock_offset_s, steady=lambda: self.cloud.now)
        self.store = self.new_store()
        wanted = replace(wanted, **fields)
        self.store.change(lambda _: Document("gpt2", "google", "model", wanted, wanted.zones))

    def new_store(self) -> DocumentStore:
        return DocumentStore(self.cloud.bucket("state"), "gpt2", "gs://state")

    def keeper(self, computer: str = "computer") -> Keeper:
        """Start a keeper; those of one computer share a history."""
        history = History(self.folder / computer / "history.db")
        return Keeper(self.cloud, self.new_store(), history, self.clock, threads=1)

    def run(self, keeper: Keeper, seconds: float, every: float = 10.0) -> Tick:
        end = self.cloud.now + seconds
        while True:
            tick = keeper.tick()
            self.cloud.advance(every)
            if self.cloud.now >= end:
                return tick

    def change(self, **fields: object) -> None:
        self.store.change(lambda document: replace(document, desired=replace(document.desired, **fields)))

    def change_document(self, **fields: object) -> None:
        self.store.change(lambda document: replace(document, **fields))

    @property
    def document(self) -> Document:
        found = self.new_store().load()
        assert found
        return found

    @property
    def ready(self) -> list[str]:
        return self.cloud.names("ready")
