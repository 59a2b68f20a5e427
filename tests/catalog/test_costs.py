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
    ("how", "place", "dollars"),
    [
        ("same zone", "us-central1-a", 0.0),
        ("same region", "us-central1-a", 0.01),
        ("same continent", "us-central1-a", 0.02),
        ("same continent", "us-central1", 0.02),
        ("same continent", "europe-west4-a", 0.02),
        ("same continent", "me-west1-a", None),
        ("other continent", "us-central2-b", 0.08),
        ("other continent", "australia-southeast1", 0.15),
        ("internet", "asia-northeast1-b", 0.12),
    ],
)
def test_traffic_is_priced_by_distance(how: network.Relation, place: str, dollars: float | None):
    price = network.transfer_price(how, place)
    assert (price and price.value) == dollars and (price is None or price.date)


def test_a_place_that_is_none_is_refused():
    with pytest.raises(InputError, match="'mars-1' is not a Google Cloud region or zone"):
        network.transfer_price("same zone", "mars-1")


def test_reading_a_bucket():
    assert network.read_price("same zone").value == 0 and network.read_price("same continent").value == 0.02
    assert network.read_price("other continent") is None and network.read_price("internet").value == 0.12
    assert network.storage_prices()["gib_month"].value == 0.02 and network.disk_prices()["balanced_gib_month"].date
