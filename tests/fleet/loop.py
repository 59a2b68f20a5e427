"""A keeper's loop without a keeper: look, remember, plan, act, as values."""

from dataclasses import dataclass, replace

from tests.fleet.cloud_model import Cloud
from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.protocol import How, Listing, TpuSpec, VmSpec
from tpuswarm.fleet.core.actions import Action, Answer, Called, Create, Delete, Ended, Event, Stop, Wait
from tpuswarm.fleet.core.desired import Desired, Wanted
from tpuswarm.fleet.core.limits import Limits, costs
from tpuswarm.fleet.core.memory import Memory, Observed, Work
from tpuswarm.fleet.core.money import machine_price
from tpuswarm.fleet.core.plan import plan
from tpuswarm.fleet.core.remember import remember
from tpuswarm.fleet.core.traffic import Traffic

FLEET = "gpt2-abc123"
ZONE = "us-central1-f"


def pool(
    name: str = "small", count: int = 1, zones: tuple[str, ...] = (ZONE,), how: How = "spot", type_: str = "v2-8",
    wait_s: float | None = None,
) -> Wanted:  # fmt: skip
    spec = TpuSpec("", zones[0], type_, how, FLEET, name, "tpu-ubuntu2204-base")
    return Wanted(name, spec, zones, count, wait_s)


def vm(name: str, spot: bool = False) -> Wanted:
    spec = VmSpec(
        f"gpt2-{name}", ZONE, "n2-highmem-8", FLEET, name, "ubuntu-os-cloud/ubuntu-2404-lts-amd64", 100, spot=spot
    )
    return Wanted(name, spec, (ZONE,), 1)


def desired(*pools: Wanted) -> Desired:
    return Desired(FLEET, pools, paid=True)


def names(cloud: Cloud, *states: str) -> list[str]:
    """Machines that are there, in these states if any are named."""
    return sorted(each.name for each in cloud.there.values() if not states or each.state in states)


@dataclass
class Loop:
    """Ticks every so many seconds of the cloud's own time."""

    cloud: Cloud
    desired: Desired
    every: float = 10.0

    def __post_init__(self) -> None:
        self.memory, self.work = Memory(), Work()
        self.answers: list[Answer] = []
        self.actions: list[Action] = []
        self.times: list[float] = []
        """Seconds after the beginning, of each action."""
        self.events: list[Event] = []
        self.busy: frozenset[str] = frozenset()
        self.traffic = Traffic()
        self.waits: tuple[Wait, ...] = ()
        self.listing = Listing((), frozenset())
        self.spent, self.begun, self.ahead = 0.0, self.cloud.now, 0.0

    @property
    def now(self) -> float:
        """What the keeper's own clock says."""
        return self.cloud.now + self.ahead

    def observed(self) -> Observed:
        return Observed(self.listing, self.memory, self.spent, self.work, self.traffic, self.busy)

    def run(self, seconds: float) -> None:
        """Look now, and then as often as fits."""
        end = self.cloud.now + seconds
        while self.cloud.now <= end:
            self.tick()
            self.pass_time(self.every)

    def pass_time(self, seconds: float) -> None:
        """What there is costs what it costs meanwhile, in truth."""
        limits = Limits(
            self.desired, Observed(Listing(tuple(self.cloud.there.values()), frozenset()), Memory()), (), self.now
        )
        for each in self.cloud.there.values():
            if (
                each.fleet == self.desired.fleet
                and each.state != "creating"
                and costs(each)
                and not limits.is_free(each)
            ):
                self.spent += (machine_price(each) or 0.0) * seconds / 3600
        self.cloud.advance(seconds)

    def jump(self, seconds: float) -> None:
        """The keeper's clock jumps."""
        self.ahead += seconds
        self.memory = self.memory.moved(seconds)

    def tick(self) -> None:
        for key, asked in self.memory.asked.items():
            if asked.operation:
                done, error = self.cloud.outcome(asked.operation)
                if done:
                    self.answers.append(Ended(key, error))
        self.listing = self.cloud.machines(self.desired.zones)
        self.memory, events = remember(self.memory, self.desired, self.listing, self.answers, self.now)
        self.events += events
        self.answers = []
        found = plan(self.desired, self.observed(), self.now)
        if found.end:
            self.desired = replace(self.desired, down=found.end)
            found = plan(self.desired, self.observed(), self.now)
        self.waits = found.waits
        for action in found.actions:
            self.act(action)

    def act(self, action: Action) -> None:
        self.actions.append(action)
        self.times.append(self.cloud.now - self.begun)
        call = {Create: self.cloud.create, Delete: self.cloud.delete, Stop: self.cloud.stop}.get(
            type(action), self.cloud.start
        )
        try:
            operation = call(action.spec if isinstance(action, Create) else action.machine)  # type: ignore[operator]
        except CloudError as error:
            self.answers.append(Called(action, None, error))
        else:
            self.answers.append(Called(action, operation, None))
