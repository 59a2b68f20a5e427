"""Decide which machines grants, budget and quota allow."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from tpuswarm.catalog import Api, find
from tpuswarm.cloud.protocol import How, Machine, Spec, TpuSpec
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.fleet_state import Observed
from tpuswarm.fleet.decide.money import (
    DELETE_MARGIN_S,
    HOUR_S,
    QuotaKey,
    covered_machines,
    format_dollars,
    machine_price,
    quota_key,
    spec_price,
)

MAX_VM_LIFETIME_S = 110 * 24 * HOUR_S
"""Compute Engine only takes termination times within 120 days."""


class Refusal(NamedTuple):
    why: str
    until: float | None = None
    """When this changes by itself (Unix seconds); None if something else has to happen."""


class Limits:
    """Tracks how much a fleet may still create under its grants, quota and budget."""

    def __init__(self, desired: Desired, observed: Observed, unlisted: Iterable[Spec], now: float):
        """`unlisted`: requested machines that no listing shows yet."""
        self._desired, self._spent, self._now = desired, observed.spent, now
        self._traffic = observed.traffic
        # Grants belong to the project: machines of other fleets and people use them too.
        billable = [machine for machine in observed.machines if is_billable(machine)]
        self._free, self._cover = covered_machines(billable, desired.grants, now)
        own = desired.own(observed.machines)
        costing = [machine for machine in own if is_billable(machine) and not self.is_free(machine)]
        self.rate = sum(machine_price(machine) or 0.0 for machine in costing)
        """Dollars per hour of existing machines, at known prices."""
        self._future_rate = self.rate
        """The rate with queued requests, which may all be granted at once, and planned machines."""
        for machine in own:
            if machine.state == "waiting" and not self._cover.claim_machine(machine):
                self._future_rate += machine_price(machine) or 0.0
        for spec in unlisted:
            self.reserve(spec)

    def is_free(self, machine: Machine) -> bool:
        return (machine.zone, machine.name) in self._free

    def is_unpaid(self, machine: Machine) -> bool:
        """Whether the machine costs money that the user has not allowed."""
        return not self._desired.paid and machine.kind == "tpu" and is_billable(machine) and not self.is_free(machine)

    def has_expired(self, machine: Machine) -> bool:
        """Whether the machine's grant has expired and the user has not allowed paid machines."""
        if self._desired.paid or machine.kind != "tpu" or self.is_free(machine):
            return False
        key = _grant_key(machine)
        return any(
            not grant.is_active(self._now) and quota_key(grant.type, grant.zone, grant.spot) == key
            for grant in self._desired.grants
        )

    def refusal(self, spec: Spec) -> Refusal | None:
        """Return why this machine may not be created; None if it may."""
        budget, zone = self._desired.budget, spec.zone
        if refusal := self._refuse_traffic(spec):
            return refusal
        if isinstance(spec, TpuSpec) and self._cover.has_room(spec):
            return None
        price = spec_price(spec)
        if not self._desired.paid and isinstance(spec, TpuSpec):
            costs = f"which costs {format_dollars(price)} an hour" if price is not None else "at an unknown price"
            return Refusal(f"{zone}: no grant covers another {spec.type}, {costs}: `tpuswarm up --paid`")
        if budget.per_hour is None and budget.total is None:
            return None
        if price is None:
            return Refusal(f"{zone}: the price of a {spec.type} there is unknown, so the budget does not allow it")
        rate = self._future_rate + price
        if budget.per_hour is not None and rate > budget.per_hour:
            limit = format_dollars(budget.per_hour)
            return Refusal(f"{zone}: {format_dollars(rate)} an hour would be above the budget's {limit}")
        if budget.total is not None and self._spent + rate > budget.total:
            rest, total = format_dollars(max(0.0, budget.total - self._spent)), format_dollars(budget.total)
            return Refusal(f"{zone}: {rest} are left of {total}, less than an hour costs")
        return None

    def _refuse_traffic(self, spec: Spec) -> Refusal | None:
        """Refuse another TPU, but no VM, if traffic has used up its daily budget."""
        limit = self._desired.budget.traffic_per_day
        if limit is None or not isinstance(spec, TpuSpec) or (paid := self._traffic.last_day(self._now)) < limit:
            return None
        allowed = format_dollars(limit)
        why = f"traffic has cost {format_dollars(paid)} in the last 24 hours, and the budget has {allowed} a day"
        return Refusal(f"{spec.zone}: {why}", self._traffic.drops_below_at(limit, self._now))

    def reserve(self, spec: Spec) -> Spec:
        """Count a planned machine. Return its spec; a VM's with the time at which the cloud itself deletes it."""
        if not isinstance(spec, TpuSpec) or not self._cover.claim(spec):
            self._future_rate += spec_price(spec) or 0.0
        when = self._desired.down_when
        if isinstance(spec, TpuSpec) or when is None or when.at is None or when.at - self._now > MAX_VM_LIFETIME_S:
            return spec
        return replace(spec, ends=max(when.at, self._now) + DELETE_MARGIN_S)  # a running keeper deletes it earlier


FREE_STATES = frozenset({"waiting", "stopped", "dead", "deleting"})
"""States in which a machine costs nothing, or only its disk."""


def is_billable(machine: Machine) -> bool:
    return machine.state not in FREE_STATES


def spec_quota(spec: Spec) -> QuotaKey:
    return _quota("tpu" if isinstance(spec, TpuSpec) else "vm", spec.api, spec.type, spec.zone, spec.how)


def machine_quota(machine: Machine) -> QuotaKey:
    return _quota(machine.kind, machine.api, machine.type, machine.zone, machine.how)


@cache
def _quota(kind: str, api: Api, type_: str, zone: str, how: How) -> QuotaKey:
    """Return the key of the quota that a machine takes; each API has quotas of its own."""
    if kind == "vm":
        return QuotaKey("vm", False, zone, False)
    spot = how in ("spot", "flex-start")
    try:
        key, is_for_serving = quota_key(type_, zone, spot), find(type_).is_for_serving
    except InputError:  # the catalogue does not know the type
        return QuotaKey(type_, False, zone, spot)
    if api == "compute":
        return QuotaKey(f"{key.generation} in Compute Engine", False, zone, spot)
    return key._replace(generation=f"{key.generation} for serving") if is_for_serving else key


def _grant_key(machine: Machine) -> QuotaKey | None:
    """Return the key of grants that cover the machine; None in Compute Engine, and for unknown types."""
    try:
        return None if machine.is_instance else quota_key(machine.type, machine.zone, machine.spot)
    except InputError:
        return None
