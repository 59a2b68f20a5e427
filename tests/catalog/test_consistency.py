"""The data agrees with itself, and every figure says where it comes from."""

import re
from collections.abc import Iterator
from datetime import date
from math import prod

import pytest

from tpuswarm import catalog
from tpuswarm.catalog.figures import Figure

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
        assert not set(zones) & set(tpu.zones("single tenant"))
        for price in tpu.prices():
            assert price.on_demand and price.on_demand > 0
            assert price.spot is None or 0 < price.spot <= price.on_demand
            assert price.on_demand / tpu.chips < 20, "the price list writes 700.0 where it knows none"
    assert catalog.find("v2-8").price("europe-west4-a") == catalog.find("v2-8").price("europe-west4")
    assert catalog.find("v5e-8").price().on_demand == pytest.approx(8 * 1.20)  # 1.2 $/chip-hour, us-central1
    assert catalog.find("tpu7x-8").price() is None and catalog.find("v5e-8").price("us-east1") is None


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


def _all(figures: list[Figure]) -> Iterator[Figure]:
    for figure in figures:
        yield figure
        yield from _all(list(figure.other))
