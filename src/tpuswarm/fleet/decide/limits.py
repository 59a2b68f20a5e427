"""Grants, budget and quota: which machines they allow."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from tpuswarm.cloud.protocol import Machine, Spec, TpuSpec
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.money import (
    DELETE_MARGIN_S,
    HOUR_S,
    QuotaKey,
    claim_machine,
    covered_machines,
    format_dollars,
    machine_price,
    quota_key,
    spec_price,
)
from tpuswarm.fleet.decide.state import Observed

MAX_VM_LIFETIME_S = 110 * 24 * HOUR_S
"""Seconds; Compute Engine ends no VM by itself that is to live for more than 120 days."""


class Refusal(NamedTuple):
    """Why something is not created now."""

    why: str
    until: float | None = None
    """When that changes by itself, Unix seconds; None: when something else happens."""


class Limits:
    """What a fleet may still have, counted down while machines are planned."""

    def __init__(self, desired: Desired, observed: Observed, unlisted: Iterable[Spec], now: float):
        """`unlisted`: what is being created and in no list yet."""
        self._desired, self._spent, self._now = desired, observed.spent, now
        self._traffic = observed.traffic
        # Machines of other fleets, and of other people, take from the same grants.
        alive = [each for each in observed.machines if is_billable(each)]
        self._free, self._cover = covered_machines(alive, desired.grants, now)
        ours = [each for each in observed.machines if each.fleet == desired.fleet]
        self.rate = sum(machine_price(each) or 0.0 for each in ours if is_billable(each) and not self.is_free(each))
        """Dollars an hour of what is there, as far as prices are known."""
        self._coming = self.rate
        """The same with what waits in line, all of which may come at once, and with what is created."""
        for each in ours:
            if each.state == "waiting" and not claim_machine(self._cover, each):
                self._coming += machine_price(each) or 0.0
        for spec in unlisted:
            self.take(spec)

    def is_free(self, machine: Machine) -> bool:
        """Whether a grant pays for a machine."""
        return (machine.zone, machine.name) in self._free

    def is_unpaid(self, machine: Machine) -> bool:
        """Whether a machine costs money that nobody has allowed."""
        return not self._desired.paid and machine.kind == "tpu" and is_billable(machine) and not self.is_free(machine)

    def expired(self, machine: Machine) -> bool:
        """Whether a grant has paid for it that does not any more, and nobody else may."""
        if self._desired.paid or machine.kind != "tpu" or self.is_free(machine):
            return False
        mine = machine_quota(machine)
        return any(
            not each.holds(self._now) and quota_key(each.type, each.zone, each.spot) == mine
            for each in self._desired.grants
        )

    def refusal(self, spec: Spec) -> Refusal | None:
        """Why this may not be created; None: it may."""
        budget, zone = self._desired.budget, spec.zone
        if refusal := self._too_much_traffic(spec):
            return refusal
        if isinstance(spec, TpuSpec) and self._cover.covers(spec.type, zone, spec.how):
            return None
        price = spec_price(spec)
        if not self._desired.paid and isinstance(spec, TpuSpec):
            costs = f"{format_dollars(price)} an hour" if price is not None else "a price that nobody says"
            return Refusal(f"{zone}: no grant covers a further {spec.type}, which costs {costs}: `tpuswarm up --paid`")
        if budget.per_hour is None and budget.total is None:
            return None
        if price is None:
            return Refusal(f"{zone}: nobody says what a {spec.type} costs there, so no budget has it")
        if budget.per_hour is not None and (rate := self._coming + price) > budget.per_hour:
            return Refusal(
                f"{zone}: {format_dollars(rate)} an hour would be above the budget's {format_dollars(budget.per_hour)}"
            )
        if budget.total is not None and self._spent + self._coming + price > budget.total:
            left = format_dollars(max(0.0, budget.total - self._spent))
            return Refusal(
                f"{zone}: {left} are left of the budget's {format_dollars(budget.total)}, less than for an hour"
            )
        return None

    def _too_much_traffic(self, spec: Spec) -> Refusal | None:
        """What trains more carries more; a head carries nothing by itself."""
        limit = self._desired.budget.traffic_per_day
        if limit is None or not isinstance(spec, TpuSpec) or (paid := self._traffic.day(self._now)) < limit:
            return None
        allowed = format_dollars(limit)
        said = f"traffic has cost {format_dollars(paid)} in the last 24 hours, and the budget has {allowed} a day"
        return Refusal(f"{spec.zone}: {said}", self._traffic.falls(limit, self._now))

    def take(self, spec: Spec) -> Spec:
        """It is created: takes its share; a VM's spec with the time at which the cloud itself is to end it."""
        if not isinstance(spec, TpuSpec) or not self._cover.take(spec.type, spec.zone, spec.how):
            self._coming += spec_price(spec) or 0.0
        when = self._desired.down_when
        if isinstance(spec, TpuSpec) or when is None or when.at is None or when.at - self._now > MAX_VM_LIFETIME_S:
            return spec
        return replace(spec, ends=max(when.at, self._now) + DELETE_MARGIN_S)  # a keeper that lives is earlier


def is_billable(machine: Machine) -> bool:
    """Whether a machine costs what it costs, or soon will."""
    return machine.state not in ("dead", "deleting", "waiting", "stopped")


def spec_quota(spec: Spec) -> QuotaKey:
    """What draws on the same quota as this."""
    return _quota("tpu" if isinstance(spec, TpuSpec) else "vm", spec.type, spec.zone, spec.how == "spot")


def machine_quota(machine: Machine) -> QuotaKey:
    """What draws on the same quota as this."""
    return _quota(machine.kind, machine.type, machine.zone, machine.spot)


def _quota(kind: str, type_: str, zone: str, spot: bool) -> QuotaKey:
    if kind == "vm":
        return QuotaKey("vm", False, zone, False)
    try:
        return quota_key(type_, zone, spot)
    except InputError:  # a type that the catalogue does not know
        return QuotaKey(type_, False, zone, spot)
