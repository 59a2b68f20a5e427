"""Weather over three zones: capacity that comes and goes, spot machines that are taken away; and a cloud under it.

Published: from 5% to 15% of preemptible machines are taken away a day, at times far more (Google's own words, on
cloud.google.com/compute/docs/instances/preemptible as others have quoted it): each zone here has one of these figures.
And machines of one type and zone mostly go together, within three minutes ("Spot-and-Scoot", arXiv:2604.16457). For how
long a zone has too little, and how often, is published for no TPU: that part is made up.
"""

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import NamedTuple

from tpuswarm.cloud.errors import CloudError, NoCapacity, NotFound, Taken
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Listing, Machine, Outcome, Spec, TpuSpec, Worker

HOUR, DAY = 3600.0, 86_400.0
TYPE = "v5e-8"
BOOT, GO, REFUSE, TOGETHER = (120.0, 300.0), (20.0, 60.0), (10.0, 30.0), (0.0, 180.0)
"""Seconds, from and to: until a machine is ready, until a deleted one is gone, until a creation fails for lack of
capacity, and until a machine is taken away whose zone has less."""
PLENTY = 1_000


class Zone(NamedTuple):
    """Its climate. In time of plenty it has room for all; else there is room for some, or for none."""

    name: str
    lost_a_day: float
    """Share of machines that are taken away, each by itself."""
    plenty_h: float
    """Hours that plenty lasts, on average."""
    scarce_h: float
    """Hours that each spell of scarcity lasts, on average."""


ZONES = (
    Zone("us-central1-a", 0.15, 14.0, 5.0),
    Zone("europe-west4-b", 0.10, 20.0, 4.0),
    Zone("us-west4-a", 0.05, 30.0, 6.0),
)
"""In order of price, as the catalogue has it."""


class Spell(NamedTuple):
    """From a moment on a zone has room for so many."""

    at: float
    zone: str
    room: int


def forecast(seed: int, seconds: float) -> list[Spell]:
    """The spells of all zones, in order of time: the same for all who live under this weather."""
    spells = []
    for zone in ZONES:
        dice, at, scarce = random.Random(f"{seed}/{zone.name}"), 0.0, False
        while at < seconds:
            room = PLENTY if not scarce else 0 if dice.random() < 0.5 else dice.randint(5, 60)
            spells.append(Spell(at, zone.name, room))
            at += dice.expovariate(1 / (HOUR * (zone.scarce_h if scarce else zone.plenty_h)))
            scarce = not scarce or dice.random() < 0.3
    return sorted(spells)


def allowed(spells: list[Spell], wanted: int, seconds: float) -> float:
    """Machine-hours that the zones had room for, of so many wanted."""
    room: dict[str, int] = {}
    total, before = 0.0, 0.0
    for at, zone, count in (*spells, Spell(seconds, "", 0)):
        total += min(wanted, sum(room.values())) * (min(at, seconds) - before)
        before, room[zone] = min(at, seconds), count
    return total / HOUR


Key = tuple[str, str]
"""Zone and name of a machine."""
Birth = tuple[Key, float]
"""A machine, and when it was created: a later one may have its name."""


@dataclass
class Sky:
    """A cloud under that weather, in virtual time. Its verbs are those of `cloud.protocol.Provider`."""

    spells: list[Spell]
    seed: int
    project: str = "model"
    now: float = 0.0
    there: dict[Key, Machine] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of ready machines, by zone."""
    calls: Counter[str] = field(default_factory=Counter)
    changed: Callable[[Key], None] | None = None
    """Is told of every change of a machine."""

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self._rate = {zone.name: zone.lost_a_day / DAY for zone in ZONES}
        self._room: dict[str, int] = defaultdict(int)
        self._housed: dict[str, set[Birth]] = defaultdict(set)
        """Machines that have room, by zone: being created, or ready."""
        self._ready: Counter[str] = Counter()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._operations: dict[str, Birth] = {}
        self._errors: dict[Birth, CloudError] = {}
        for spell in self.spells:
            self.at(spell.at, partial(self._turn, spell))

    # Time.

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have something happen."""
        heapq.heappush(self._due, (when, next(self._number), what))

    @property
    def next(self) -> float:
        """When something happens next."""
        return self._due[0][0] if self._due else inf

    def advance(self, until: float) -> None:
        """Let time pass."""
        while self._due and self._due[0][0] <= until:
            when, _, what = heapq.heappop(self._due)
            self._pass(when)
            what()
        self._pass(until)

    def _pass(self, until: float) -> None:
        for zone, count in self._ready.items():
            self.held[zone] += count * (until - self.now)
        self.now = until

    # What is asked of it.

    def machines(self, zones: Iterable[str]) -> Listing:
        """See Provider."""
        self.calls["machines"] += 1
        return Listing(tuple(self.there.values()), frozenset())

    def create(self, spec: Spec) -> str:
        """See Provider. Lack of capacity shows after a while, as the failure of the operation."""
        self.calls["create"] += 1
        key = (spec.zone, spec.name)
        if key in self.there:
            raise Taken(f"{spec.name} exists already in {spec.zone}")
        assert isinstance(spec, TpuSpec)
        labels = {FLEET_LABEL: spec.fleet, POOL_LABEL: spec.pool}
        made = Machine(
            spec.name,
            spec.zone,
            "tpu",
            spec.type,
            "creating",
            "CREATING",
            how=spec.how,
            created=self.now,
            labels=labels,
        )
        birth = (key, self.now)
        operation = f"operation-{next(self._number)}"
        self._operations[operation] = birth
        self._put(made)
        if len(self._housed[spec.zone]) < self._room[spec.zone]:
            self._housed[spec.zone].add(birth)
            self._later(BOOT, birth, self._come)
        else:
            self._later(REFUSE, birth, self._refuse)
        return operation

    def delete(self, machine: Machine) -> str:
        """See Provider."""
        self.calls["delete"] += 1
        key = (machine.zone, machine.name)
        if (found := self.there.get(key)) is None:
            raise NotFound(f"there is no {machine.name}")
        if found.state != "deleting":
            self._put(found, state="deleting", said="DELETING", healthy=None)
            self._later(GO, (key, found.created), self._drop)
        return "deletion"

    def outcome(self, operation: str) -> Outcome:
        """See Provider."""
        self.calls["outcome"] += 1
        birth = self._operations[operation]
        found = self.there.get(birth[0])
        error = self._errors.get(birth)
        under_way = found is not None and found.created == birth[1] and found.state == "creating"
        return Outcome(not under_way, error)

    # What happens in it.

    def _later(self, within: tuple[float, float], birth: Birth, what: Callable[[Machine], None]) -> None:
        """Do that to a machine, if it is there then."""

        def due() -> None:
            found = self.there.get(birth[0])
            if found is not None and found.created == birth[1]:
                what(found)

        self.at(self.now + self._dice.uniform(*within), due)

    def _put(self, machine: Machine, **facts: object) -> None:
        """It is so from now on."""
        key = (machine.zone, machine.name)
        self._ready[machine.zone] += (facts.get("state") == "ready") - (machine.state == "ready")
        self.there[key] = replace(machine, **facts)  # type: ignore[arg-type]
        if facts.get("state") in ("dead", "deleting"):
            self._housed[machine.zone].discard((key, machine.created))
        if self.changed:
            self.changed(key)

    def _drop(self, machine: Machine) -> None:
        key = (machine.zone, machine.name)
        del self.there[key]
        if self.changed:
            self.changed(key)

    def _come(self, machine: Machine) -> None:
        if machine.state == "creating":
            self._put(machine, state="ready", said="READY", healthy=True, workers=(Worker("10.0.0.2", None),))
            alone = self._dice.expovariate(self._rate[machine.zone])
            self._later((alone, alone), ((machine.zone, machine.name), machine.created), self._take)

    def _refuse(self, machine: Machine) -> None:
        if machine.state == "creating":
            birth = ((machine.zone, machine.name), machine.created)
            self._errors[birth] = NoCapacity(f"There is no more capacity in the zone {machine.zone!r}")
            self._drop(machine)

    def _take(self, machine: Machine) -> None:
        if machine.state in ("creating", "ready"):
            self._put(machine, state="dead", said="PREEMPTED", healthy=None, workers=())

    def _turn(self, spell: Spell) -> None:
        """The weather changes: who has no room any more goes soon."""
        self._room[spell.zone] = spell.room
        housed = sorted(self._housed[spell.zone])
        for birth in self._dice.sample(housed, max(0, len(housed) - spell.room)):
            self._later(TOGETHER, birth, self._take)
