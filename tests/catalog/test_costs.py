"""Machines for a head, and what traffic costs between places."""

import pytest

from tpuswarm import catalog
from tpuswarm.catalog import network
from tpuswarm.errors import InputError


def test_machines_cost_what_the_list_says():
    by_name = {each.name: each for each in catalog.machines()}
    assert len(by_name) == len(catalog.machines())
    for name, place, on_demand, spot in (  # rows of the list, at sizes the rates were not taken from
        ("n2-highmem-80", "us-central1", 5.24056, 1.71296),
        ("n2-highmem-80", "europe-west4-a", 5.76912, 2.0096),
        ("c3d-standard-4", "us-west4", 0.20453, 0.03893),
        ("c3d-standard-360", "us-central1-f", 16.34364, 2.47032),
    ):
        price = by_name[name].price(place)
        assert (price.on_demand, price.spot) == pytest.approx((on_demand, spot), rel=1e-3), name
    assert by_name["e2-standard-4"].price("us-central1").on_demand == pytest.approx(0.13402, rel=1e-3)
    assert (by_name["e2-highmem-16"].memory_gib, by_name["e2-highmem-16"].network_gbps) == (128, 16)
    assert by_name["e2-highmem-16"].price("us-central2-b") is None
    for machine in catalog.machines():
        assert all(0 < each.spot <= each.on_demand for each in machine.prices)
        assert all(each.source.read for each in machine.figures.values())


@pytest.mark.parametrize(
    ("origin", "destination", "how", "dollars"),
    [
        ("us-central1-a", "us-central1-a", "same zone", 0.0),
        ("us-central1-a", "us-central1-b", "same region", 0.01),
        ("us-central1-a", "us-central1", "same region", 0.01),
        ("us-central1-a", "us-east5-a", "same continent", 0.02),
        ("us-central1", "northamerica-northeast1", "same continent", 0.02),
        ("europe-west4-a", "europe-west1-b", "same continent", 0.02),
        ("us-central2-b", "europe-west4-a", "other continent", 0.08),
        ("australia-southeast1", "us-east1-d", "other continent", 0.15),
        ("me-west1-a", "me-central1-a", "same continent", None),
        ("asia-northeast1-b", "internet", "internet", 0.12),
    ],
)
def test_traffic_is_priced_by_distance(origin: str, destination: str, how: str, dollars: float | None):
    assert network.relation(origin, destination) == how
    price = network.transfer_price(origin, destination)
    assert (price and price.value) == dollars and (price is None or price.date)


def test_a_place_that_is_none_is_refused():
    with pytest.raises(InputError, match="'mars-1' is no region or zone"):
        network.transfer_price("mars-1", "us-east1")


def test_a_distance_is_priced_without_its_other_end():
    assert network.transfer_price_over("other continent", "europe").value == 0.08
    assert network.transfer_price_over("other continent", "oceania").value == 0.15
    assert network.transfer_price_over("same continent", "africa") is None
    assert network.read_price_over("same zone").value == 0 and network.read_price_over("internet").value == 0.12


def test_reading_a_bucket():
    assert network.read_price("us-central1", "us-central1-a").value == 0
    assert network.read_price("us-central1", "us-east5-a").value == 0.02
    assert network.read_price("us-central1", "europe-west4-a") is None
    assert network.storage_prices()["gib_month"].value == 0.02 and network.disk_prices()["balanced_gib_month"].date
