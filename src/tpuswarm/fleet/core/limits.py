"""Grants, budget and quota: which machines they allow."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from tpuswarm.cloud.protocol import Machine, Spec, TpuSpec
from tpuswarm.errors import InputError
from tpuswarm.fleet.core.desired import Desired
from tpuswarm.fleet.core.memory import Observed
from tpuswarm.fleet.core.money import HOUR, Lot, covered, dollars, lot, machine_price, spec_price


class Refusal(NamedTuple):
    """Why something is not created now."""

    why: str
    until: float | None = None
    """When that changes by itself, Unix seconds; None: when something else happens."""


class Limits:
    """What a fleet may still have, counted down while machines are planned."""

    def __init__(self, desired: Desired, observed: Observed, unlisted: Iterable[Spec], now: float):
        """`unlisted`: what is being created and in no list yet."""
        self._desired, self._spent, self._now, self._work = desired, observed.spent, now, observed.work
        # Machines of other fleets, and of other people, take from the same grants.
        alive = [each for each in observed.machines if costs(each)]
        self._free, self._cover = covered(alive, desired.grants, now)
        self.rate = 0.0
        """Dollars an hour of what is there, as far as prices are known."""
        for each in alive:
            if each.fleet == desired.fleet and not self.is_free(each):
                self.rate += machine_price(each) or 0.0
        for spec in unlisted:
            self.take(spec)

    def is_free(self, machine: Machine) -> bool:
        """Whether a grant pays for a machine."""
        return (machine.zone, machine.name) in self._free

    def expired(self, machine: Machine) -> bool:
        """Whether a grant has paid for it that does not any more, and nobody else may."""
        if self._desired.paid or machine.kind != "tpu" or self.is_free(machine):
            return False
        mine = machine_quota(machine)
        return any(
            not each.holds(self._now) and lot(each.type, each.zone, each.spot) == mine for each in self._desired.grants
        )

    def refusal(self, spec: Spec) -> Refusal | None:
        """Why this may not be created; None: it may."""
        budget, zone = self._desired.budget, spec.zone
        if budget.traffic_per_day is not None and self._work.traffic_dollars >= budget.traffic_per_day:
            spent, limit = dollars(self._work.traffic_dollars), dollars(budget.traffic_per_day)
            return Refusal(f"traffic has cost {spent} within a day, and the budget is {limit}")
        if isinstance(spec, TpuSpec) and self._cover.covers(spec.type, zone, spec.how):
            return None
        price = spec_price(spec)
        if not self._desired.paid and isinstance(spec, TpuSpec):
            costs = f"{dollars(price)} an hour" if price is not None else "a price that nobody says"
            return Refusal(f"{zone}: no grant covers a further {spec.type}, which costs {costs}: `tpuswarm up --paid`")
        if budget.per_hour is None and budget.total is None:
            return None
        if price is None:
            return Refusal(f"{zone}: nobody says what a {spec.type} costs there, so no budget has it")
        if budget.per_hour is not None and (rate := self.rate + price) > budget.per_hour:
            return Refusal(f"{zone}: {dollars(rate)} an hour would be above the budget's {dollars(budget.per_hour)}")
        if budget.total is not None and self._spent + self.rate + price > budget.total:
            left = dollars(max(0.0, budget.total - self._spent))
            return Refusal(f"{zone}: {left} are left of the budget's {dollars(budget.total)}, less than for an hour")
        return None

    def take(self, spec: Spec) -> Spec:
        """It is created: takes its share; the spec with the time after which the cloud itself is to end it."""
        desired, ends = self._desired, []
        if isinstance(spec, TpuSpec) and self._cover.take(spec.type, spec.zone, spec.how):
            if not desired.paid:
                mine = spec_quota(spec)
                grants = (each for each in desired.grants if lot(each.type, each.zone, each.spot) == mine)
                ends += [each.expires for each in grants if each.expires is not None]
        else:
            self.rate += spec_price(spec) or 0.0
            if desired.budget.total is not None and self.rate:
                ends.append(self._now + (desired.budget.total - self._spent) / self.rate * HOUR)
        if desired.down_when and desired.down_when.at is not None:
            ends.append(desired.down_when.at)
        if not ends or not isinstance(spec, TpuSpec):
            return spec
        return replace(spec, max_run_s=max(0.0, min(ends) - self._now))


def costs(machine: Machine) -> bool:
    """Whether a machine costs what it costs, or soon will."""
    return machine.state not in ("dead", "deleting", "waiting", "stopped")


def how_of(spec: Spec) -> str:
    """How it is asked for."""
    if isinstance(spec, TpuSpec):
        return spec.how
    return "spot" if spec.spot else "on-demand"


def spec_quota(spec: Spec) -> Lot:
    """What draws on the same quota as this."""
    return _quota("tpu" if isinstance(spec, TpuSpec) else "vm", spec.type, spec.zone, how_of(spec) == "spot")


def machine_quota(machine: Machine) -> Lot:
    """What draws on the same quota as this."""
    return _quota(machine.kind, machine.type, machine.zone, machine.spot)


def _quota(kind: str, type_: str, zone: str, spot: bool) -> Lot:
    if kind == "vm":
        return Lot("vm", False, zone, False)
    try:
        return lot(type_, zone, spot)
    except InputError:  # a type that the catalogue does not know
        return Lot(type_, False, zone, spot)
