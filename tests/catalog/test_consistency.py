"""The data agrees with itself, and every figure says where it comes from."""

import re
from collections.abc import Iterator
from datetime import date
from math import prod

import pytest

from tpuswarm import catalog
from tpuswarm.catalog.figures import Figure
from tpuswarm.catalog.prices import region_of

ZONE = re.compile(r"[a-z]+-[a-z]+\d+-([a-z]|ai\d+[a-z]?)")
ALL = catalog.accelerators()


@pytest.mark.parametrize("tpu", ALL, ids=lambda each: each.name)
def test_sizes_of_a_slice_agree(tpu: catalog.Accelerator):
    assert tpu.chips == prod(tpu.topology) == tpu.hosts * tpu.chips_per_host
    assert all(whole % part == 0 for whole, part in zip(tpu.topology, tpu.host_topology, strict=True))
    assert tpu.chips <= tpu.generation.pod_chips
    counted = {"cores": tpu.cores, "chips": tpu.chips}[tpu.generation.name_counts]
    assert tpu.name == f"{tpu.generation.name}-{counted}", "the number in the name counts cores or chips"
    assert tpu.compiler.name.split(":")[1] == "x".join(map(str, tpu.topology))
    assert tpu.gke is None or tpu.gke.machine.endswith(f"-{tpu.chips_per_host}t")
    assert (tpu.api_name is None) == ("TPU API" not in tpu.generation.apis)
    assert (tpu.gke is None) == ("GKE" not in tpu.generation.apis)


def test_every_name_of_every_dialect_finds_its_slice_and_no_other():
    names = [name for tpu in ALL for name in tpu.names]
    assert len(names) == len(set(names))
    assert all(catalog.find(name) is tpu and catalog.find(name.upper()) is tpu for tpu in ALL for name in tpu.names)
    eight = catalog.find("v5litepod-8")
    assert eight is catalog.find("v5e:2x4") is catalog.find("tpu-v5-lite-podslice:2x4") is catalog.find("v5e-8")
    assert (eight.chips, eight.cores, catalog.find("v5p-8").chips, catalog.find("v3-8").devices) == (8, 8, 4, 8)


def test_zones_and_prices():
    for tpu in ALL:
        zones = tpu.zones()
        assert zones and len(zones) == len(set(zones)) and all(ZONE.fullmatch(each) for each in zones)
        offered = [zone for offer in tpu.offers for zone in offer.zones]
        assert len(offered) == len(set(offered)), "a zone offers a type in one way"
        assert {price.region for price in tpu.prices()} <= {region_of(zone) for zone in offered}
        for price in tpu.prices():
            assert price.on_demand and price.on_demand > 0
            assert price.spot is None or 0 < price.spot <= price.on_demand
            assert price.on_demand / tpu.chips < 20, "the price list writes 700.0 where it knows none"
    assert catalog.find("v2-8").price("europe-west4-a") == catalog.find("v2-8").price("europe-west4")
    assert catalog.find("v5e-8").price().on_demand == pytest.approx(8 * 1.20)  # 1.2 $/chip-hour, us-central1
    assert catalog.find("tpu7x-8").price() is None and catalog.find("v5e-8").price("us-east7") is None


@pytest.mark.parametrize(
    ("name", "zone", "on_demand", "spot"),
    [  # rows of the list; in these zones the documentation has no such TPU, or a single tenant has it
        ("v3-8", "us-central1-f", 8.0, 2.04),
        ("v5e-8", "us-east1-b", 9.6, 1.95941),
        ("v5e-8", "us-east4-b", 9.6, 4.8),
        ("v5e-8", "us-east5-c", 9.6, 4.8),
        ("v5e-16", "asia-northeast1-b", 24.65664, 6.79045),
        ("v5e-256", "asia-east1-c", 355.70688, 142.28275),
        ("v5e-128", "asia-southeast1-b", 199.68, 99.84),
        ("v5e-64", "europe-north1-c", 84.56448, 42.28224),
        ("v5e-64", "europe-west1-b", 84.56448, 33.82579),
        ("v5e-64", "europe-west3-c", 90.624, 24.95782),
        ("v5e-64", "europe-west4-a", 99.84, 28.47891),
        ("v5e-64", "northamerica-northeast1-b", 84.56448, 23.28909),
        ("v5e-256", "southamerica-west1-b", 439.296, 120.98202),
        ("v5e-256", "southamerica-west1-c", 439.296, 120.98202),
        ("v5p-1024", "us-east1-d", 2150.4, 427.87891),
        ("v5p-12288", "europe-west1-d", 27398.89152, 10959.55661),
        ("v6e-256", "us-south1-c", 691.2, 345.6),
    ],
)
def test_what_is_only_sold_has_the_price_of_the_list(name: str, zone: str, on_demand: float, spot: float):
    tpu = catalog.find(name)
    assert zone in {*tpu.zones("sold"), *tpu.zones("single tenant")}
    price = tpu.price(zone)
    assert price and (price.on_demand, price.spot) == pytest.approx((on_demand, spot), rel=1e-4)


def test_a_zone_of_the_list_without_a_price():
    tpu = catalog.find("v6e-8")
    assert "asia-east1-c" in tpu.zones("sold") and tpu.price("asia-east1-c") is None
    assert catalog.find("tpu7x-8").zones() == ("us-central1-c", "us-central1-ai1a")


def test_every_figure_has_source_and_date():
    figures = [figure for each in (*catalog.generations(), *catalog.gpus()) for figure in each.figures.values()]
    figures += [
        figure for each in catalog.generations() for host in each.hosts.values() for figure in host.figures.values()
    ]
    for figure in _all(figures):
        assert figure.value not in (None, "") and isinstance(figure.date, date)
        assert figure.source.title and figure.source.url.startswith("https://")
    for source in [each.source for each in ALL] + [price.source for each in ALL for price in each.prices()]:
        assert isinstance(source.read, date)


def test_spot_tpus_that_others_kept_are_of_the_catalogue_and_have_a_source():
    found = catalog.kept_spot_tpus()
    assert len(found) == 7 and sum(each.lost for each in found) == 42
    for each in found:
        assert catalog.find(each.type).name == each.type and each.source.url.startswith("https://")
        assert each.ran < each.hours and each.hours_between > 1 > each.hours_away


def test_what_a_page_once_said_is_beside_what_it_says():
    bandwidth = catalog.find("v6e-8").generation.figures["bandwidth"]
    assert [each.value for each in _all([bandwidth])] == [1638e9, 1600e9, 1640e9]


def _all(figures: list[Figure]) -> Iterator[Figure]:
    for figure in figures:
        yield figure
        yield from _all(list(figure.other))
