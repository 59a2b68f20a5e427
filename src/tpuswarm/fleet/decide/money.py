"""Prices of machines per hour, and the grants that cover them. An unknown price is None, never 0."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

from tpuswarm.catalog import Api, find, generations, machines, network
from tpuswarm.cloud.protocol import How, Machine, Spec, TpuSpec
from tpuswarm.errors import InputError

HOUR_S, DAY_S = 3600.0, 86_400.0
HOURS_PER_MONTH = 730.0
"""Google's month for the price of disks."""
DELETE_MARGIN_S = 600.0
"""How long a deletion may take: machines are deleted this long before they would cost too much."""


@dataclass(frozen=True)
class Grant:
    type: str
    """A type of TPU, or a generation: then `count` counts chips."""
    zone: str
    spot: bool
    count: int
    expires: float | None
    """Unix seconds."""

    @property
    def chips(self) -> int:
        return self.count * chips_of(self.type)

    def is_active(self, now: float) -> bool:
        """Whether a machine deleted now would be gone before the grant expires."""
        return self.expires is None or now < self.expires - DELETE_MARGIN_S


@cache
def is_generation(type_: str) -> bool:
    return any(generation.name == type_ for generation in generations())


def chips_of(type_: str) -> int:
    """Return the chips of a type; 1 for a generation."""
    return 1 if is_generation(type_) else find(type_).chips


def describe_grant(type_: str, count: int) -> str:
    """`5 v3-8`, or `64 v6e chips`."""
    return f"{count:,} {type_}{' chips' if is_generation(type_) else ''}"


class QuotaKey(NamedTuple):
    """TPUs with the same key share a quota, and so a grant: chips of a generation in a zone.

    Quota for v2 and v3 slices of several hosts ("pods") is separate from quota for single hosts.
    """

    generation: str
    pods: bool
    zone: str
    spot: bool


@cache
def quota_key(type_: str, zone: str, spot: bool) -> QuotaKey:
    if is_generation(type_):
        return QuotaKey(type_, False, zone, spot)
    found = find(type_)
    has_pod_quota = found.generation.name in ("v2", "v3")
    return QuotaKey(found.generation.name, has_pod_quota and found.hosts > 1, zone, spot)


class Tpu(Protocol):
    """What grants need to know of a TPU, wanted or existing."""

    @property
    def type(self) -> str: ...
    @property
    def zone(self) -> str: ...
    @property
    def how(self) -> How: ...
    @property
    def api(self) -> Api: ...


class GrantCover:
    """The chips that grants still cover, counted down as machines claim them."""

    def __init__(self, grants: Iterable[Grant], now: float):
        self._chips: dict[QuotaKey, int] = {}
        for grant in grants:
            if grant.is_active(now):
                key = quota_key(grant.type, grant.zone, grant.spot)
                self._chips[key] = self._chips.get(key, 0) + grant.chips

    def has_room(self, tpu: Tpu) -> bool:
        """Whether the grants cover one more TPU. They are quota of the TPU API, not of Compute Engine."""
        if not self._chips or tpu.how in ("reserved", "flex-start") or tpu.api == "compute":
            return False
        return self._chips.get(quota_key(tpu.type, tpu.zone, tpu.how == "spot"), 0) >= find(tpu.type).chips

    def claim(self, tpu: Tpu) -> bool:
        """Take the chips of one more TPU; return whether there was room."""
        if not self.has_room(tpu):
            return False
        self._chips[quota_key(tpu.type, tpu.zone, tpu.how == "spot")] -= find(tpu.type).chips
        return True

    def claim_machine(self, machine: Machine) -> bool:
        try:
            return machine.kind == "tpu" and self.claim(machine)
        except InputError:  # the catalogue does not know the type
            return False


def covered_machines(
    machines: Iterable[Machine], grants: Sequence[Grant], now: float
) -> tuple[set[tuple[str, str]], GrantCover]:
    """Return the machines (zone, name) that grants cover, oldest first, and the rest of the grants."""
    cover = GrantCover(grants, now)
    oldest_first = sorted(machines, key=lambda machine: (machine.created, machine.name)) if grants else ()
    return {(machine.zone, machine.name) for machine in oldest_first if cover.claim_machine(machine)}, cover


@cache
def tpu_price(type_: str, zone: str, spot: bool) -> float | None:
    """Return dollars per hour."""
    try:
        price = find(type_).price(zone)
    except InputError:
        return None
    return None if price is None else price.spot if spot else price.on_demand


@cache
def vm_price(type_: str, zone: str, spot: bool, disk_gib: int) -> float | None:
    """Return dollars per hour, with the boot disk."""
    found = next((machine for machine in machines() if machine.name == type_), None)
    price = found.price(zone) if found else None
    dollars = None if price is None else price.spot if spot else price.on_demand
    if dollars is None:
        return None
    return dollars + disk_gib * float(network.disk_prices()["balanced_gib_month"].value) / HOURS_PER_MONTH


def spec_price(spec: Spec) -> float | None:
    if isinstance(spec, TpuSpec):
        return tpu_price(spec.type, spec.zone, spec.how == "spot")
    return vm_price(spec.type, spec.zone, spec.spot, spec.disk_gib)


def machine_price(machine: Machine) -> float | None:
    """Return dollars per hour of a running machine; of a VM with its boot disk."""
    if machine.kind == "tpu":
        return tpu_price(machine.type, machine.zone, machine.spot)
    return vm_price(machine.type, machine.zone, machine.spot, machine.disk_gib or 0)


@dataclass(frozen=True)
class Rate:
    dollars: float = 0.0
    unknown: int = 0

    def plus(self, price: float | None) -> "Rate":
        return Rate(self.dollars, self.unknown + 1) if price is None else Rate(self.dollars + price, self.unknown)

    @property
    def hour(self) -> str:
        """`$4.50`, or `$4.50 and 2 unknown prices`."""
        return self._text(1.0)

    @property
    def day(self) -> str:
        return self._text(24.0)

    def _text(self, hours: float) -> str:
        if not self.unknown:
            return format_dollars(self.dollars * hours)
        count = f"{self.unknown:,} unknown price{'s' * (self.unknown > 1)}"
        return f"{format_dollars(self.dollars * hours)} and {count}" if self.dollars else count


def format_dollars(amount: float | None) -> str:
    """`$1,234.50`, or `unknown` for None."""
    if amount is None:
        return "unknown"
    return f"${amount:,.2f}" if amount >= 0.01 or amount == 0 else f"${amount:.4f}"
