"""Dollars: what machines cost an hour, and what grants cover. A price that no source says is unknown, never 0."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tpuswarm.catalog import find, machines, network
from tpuswarm.cloud.protocol import How, Machine, Spec, TpuSpec
from tpuswarm.errors import InputError

HOUR_S, DAY_S = 3600.0, 86_400.0
MONTH_HOURS = 730.0
"""In which Google bills disks by the month."""
DELETE_MARGIN_S = 600.0
"""Seconds that a machine may take to be gone: what may not cost more is deleted so long before it would."""


@dataclass(frozen=True)
class Grant:
    """So many TPUs of a type that cost nothing in a zone."""

    type: str
    zone: str
    spot: bool
    count: int
    expires: float | None
    """Unix seconds."""

    @property
    def chips(self) -> int:
        """Of all of them."""
        return self.count * find(self.type).chips

    def holds(self, now: float) -> bool:
        """Whether a machine that begins to go now still goes in time."""
        return self.expires is None or now < self.expires - DELETE_MARGIN_S


class QuotaKey(NamedTuple):
    """What is counted together by a quota, and so by a grant: chips of a generation in a zone.

    Of v2 and v3 machines of one host and pods are apart: pod quota is no v2-8 quota.
    """

    generation: str
    pods: bool
    zone: str
    spot: bool


@cache
def quota_key(type_: str, zone: str, spot: bool) -> QuotaKey:
    """Of which lot a TPU takes its chips."""
    found = find(type_)
    apart = found.generation.name in ("v2", "v3")
    return QuotaKey(found.generation.name, apart and found.hosts > 1, zone, spot)


class GrantCover:
    """How many chips of each lot are still free of charge."""

    def __init__(self, grants: Iterable[Grant], now: float):
        """All of what the grants hold at that time."""
        self._left: dict[QuotaKey, int] = {}
        for grant in grants:
            if grant.holds(now):
                key = quota_key(grant.type, grant.zone, grant.spot)
                self._left[key] = self._left.get(key, 0) + grant.chips

    def covers(self, type_: str, zone: str, how: How) -> bool:
        """Whether one more such TPU is covered."""
        if not self._left or how == "reserved":
            return False
        return self._left.get(quota_key(type_, zone, how == "spot"), 0) >= find(type_).chips

    def take(self, type_: str, zone: str, how: How) -> bool:
        """The same; if so, it has its chips now."""
        if not self.covers(type_, zone, how):
            return False
        self._left[quota_key(type_, zone, how == "spot")] -= find(type_).chips
        return True


def covered_machines(
    among: Iterable[Machine], grants: Sequence[Grant], now: float
) -> tuple[set[tuple[str, str]], GrantCover]:
    """Machines (zone and name) that grants pay for, oldest first, and what is left of the grants."""
    cover = GrantCover(grants, now)
    oldest = sorted(among, key=lambda each: (each.created, each.name)) if grants else ()
    return {(each.zone, each.name) for each in oldest if claim_machine(cover, each)}, cover


def claim_machine(cover: GrantCover, machine: Machine) -> bool:
    """Whether a grant still has room for a machine, which then has its chips."""
    try:
        return machine.kind == "tpu" and cover.take(machine.type, machine.zone, machine.how)
    except InputError:  # a type that the catalogue does not know
        return False


@cache
def tpu_price(type_: str, zone: str, spot: bool) -> float | None:
    """Dollars an hour of a TPU; None: unknown."""
    try:
        price = find(type_).price(zone)
    except InputError:
        return None
    return None if price is None else price.spot if spot else price.on_demand


@cache
def vm_price(type_: str, zone: str, spot: bool, disk_gib: int) -> float | None:
    """Dollars an hour of a VM with its boot disk; None: unknown."""
    found = next((each for each in machines() if each.name == type_), None)
    price = found.price(zone) if found else None
    dollars = None if price is None else price.spot if spot else price.on_demand
    if dollars is None:
        return None
    return dollars + disk_gib * float(network.disk_prices()["balanced_gib_month"].value) / MONTH_HOURS


def spec_price(spec: Spec) -> float | None:
    """Dollars an hour of what is to be created; None: unknown."""
    if isinstance(spec, TpuSpec):
        return tpu_price(spec.type, spec.zone, spec.how == "spot")
    return vm_price(spec.type, spec.zone, spec.spot, spec.disk_gib)


def machine_price(machine: Machine) -> float | None:
    """Dollars an hour of what is there, while it costs anything; a VM's without its disk. None: unknown."""
    if machine.kind == "tpu":
        return tpu_price(machine.type, machine.zone, machine.spot)
    return vm_price(machine.type, machine.zone, machine.spot, 0)


@dataclass(frozen=True)
class Rate:
    """Dollars an hour of several machines: what is known, and of how many it is not known."""

    dollars: float = 0.0
    unknown: int = 0

    def plus(self, price: float | None) -> "Rate":
        """With one more machine."""
        return Rate(self.dollars, self.unknown + 1) if price is None else Rate(self.dollars + price, self.unknown)

    @property
    def hour(self) -> str:
        """`$4.50`, or what is known of it and how many prices are not."""
        return self._said(1.0)

    @property
    def day(self) -> str:
        """The same for 24 hours."""
        return self._said(24.0)

    def _said(self, hours: float) -> str:
        if not self.unknown:
            return format_dollars(self.dollars * hours)
        count = f"{self.unknown:,} unknown price{'s' * (self.unknown > 1)}"
        return f"{format_dollars(self.dollars * hours)} and {count}" if self.dollars else count


def format_dollars(amount: float | None) -> str:
    """`$1,234.50`; `unknown` for None."""
    if amount is None:
        return "unknown"
    return f"${amount:,.2f}" if amount >= 0.01 or amount == 0 else f"${amount:.4f}"
