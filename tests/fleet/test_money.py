"""What grants cover, and what is unknown."""

import pytest

from tpuswarm.cloud.protocol import Machine
from tpuswarm.fleet.core.money import MARGIN, Cover, Grant, Rate, covered, machine_price, vm_price

NOW = 1_800_000_000.0


def machine(name: str, type_: str = "v2-8", zone: str = "us-central1-f", how: str = "spot", created: float = 0.0):
    return Machine(name, zone, "tpu", type_, "ready", "READY", how=how, created=created)  # type: ignore[arg-type]


def test_a_grant_covers_the_oldest_and_no_more():
    among = [machine("new", created=3.0), machine("old", created=1.0), machine("middle", created=2.0)]
    found, left = covered(among, [Grant("v2-8", "us-central1-f", True, 2, None)], NOW)
    assert found == {("us-central1-f", "old"), ("us-central1-f", "middle")}
    assert not left.take("v2-8", "us-central1-f", "spot")


@pytest.mark.parametrize(
    ("grant", "asked", "taken"),
    [
        (("v2-8", True), ("v2-8", "spot"), True),
        (("v2-8", True), ("v2-8", "on-demand"), False),
        (("v2-8", False), ("v2-8", "on-demand"), True),
        (("v2-8", False), ("v2-8", "queued"), True),  # a request in line asks for one on demand
        (("v2-8", False), ("v2-8", "reserved"), False),
        (("v2-32", True), ("v2-8", "spot"), False),  # pod quota is not v2-8 quota
        (("v2-8", True), ("v2-32", "spot"), False),
        (("v4-8", True), ("v4-8", "spot"), True),
        (("v4-8", True), ("v4-16", "spot"), True),  # two of v4-8 are the chips of one v4-16
        (("v4-8", True), ("v4-32", "spot"), False),
        (("v3-8", True), ("v2-8", "spot"), False),
    ],
)
def test_what_counts_together(grant, asked, taken):
    cover = Cover([Grant(grant[0], "us-central1-f", grant[1], 2, None)], NOW)
    assert cover.take(asked[0], "us-central1-f", asked[1]) == taken
    assert not cover.take(asked[0], "us-central1-b", asked[1])


def test_a_grant_ends_in_time_for_its_machines_to_go():
    grant = Grant("v2-8", "us-central1-f", True, 1, NOW)
    assert grant.holds(NOW - MARGIN - 1) and not grant.holds(NOW - MARGIN)


def test_prices():
    assert machine_price(machine("a")) == pytest.approx(1.35)
    assert machine_price(machine("a", how="on-demand")) == pytest.approx(4.5)
    assert machine_price(machine("a", "v6e-8", "asia-east1-c")) is None
    assert machine_price(machine("a", "v99-8")) is None  # listed by the cloud, unknown to the catalogue
    with_disk = vm_price("n2-highmem-8", "us-central1-f", False, 200)
    without = vm_price("n2-highmem-8", "us-central1-f", False, 0)
    assert with_disk and without and with_disk - without == pytest.approx(200 * 0.1 / 730)


def test_unknown_prices_are_said():
    rate = Rate().plus(1.35).plus(None).plus(1.35)
    assert rate.hour == "$2.70 and 1 unknown price" and rate.day == "$64.80 and 1 unknown price"
    assert Rate().plus(None).plus(None).hour == "2 unknown prices"
    assert Rate().hour == "$0.00"
