"""The catalogue's data agrees with itself and with the documentation, and every figure has a source."""

import re
from collections.abc import Iterator
from datetime import date, timedelta
from math import prod
from pathlib import Path

import pytest

from tpuswarm import catalog
from tpuswarm.catalog import network
from tpuswarm.catalog.figures import Figure, find_source, read_data
from tpuswarm.catalog.prices import describe_old_prices, region_of
from tpuswarm.errors import InputError

ZONE = re.compile(r"[a-z]+-[a-z]+\d+-([a-z]|ai\d+[a-z])")
ALL = catalog.accelerators()


@pytest.mark.parametrize("tpu", ALL, ids=lambda tpu: tpu.name)
def test_sizes_of_a_slice_agree(tpu: catalog.Accelerator):
    assert tpu.chips == prod(tpu.topology) == tpu.hosts * tpu.chips_per_host
    assert all(whole % part == 0 for whole, part in zip(tpu.topology, tpu.host_topology, strict=True))
    assert tpu.chips <= tpu.generation.pod_chips
    counted = {"cores": tpu.cores, "chips": tpu.chips}[tpu.generation.name_counts]
    assert tpu.name == f"{tpu.generation.name}-{counted}"
    assert tpu.compiler.name.split(":")[1] == "x".join(map(str, tpu.topology))
    assert tpu.gke is None or tpu.gke.machine.endswith(f"-{tpu.chips_per_host}t")
    assert (tpu.api_name is None) == ("TPU API" not in tpu.generation.apis)
    assert (tpu.gke is None) == ("GKE" not in tpu.generation.apis)


def test_each_name_finds_one_slice():
    assert all(catalog.find(name) is tpu and catalog.find(name.upper()) is tpu for tpu in ALL for name in tpu.names)
    tpu = catalog.find("v5litepod-8")
    assert {"v5litepod-8", "v5e:2x4", "tpu-v5-lite-podslice:2x4", "v5e-8"} <= set(tpu.names)
    assert (tpu.chips, tpu.cores, catalog.find("v5p-8").chips, catalog.find("v3-8").devices) == (8, 8, 4, 8)


@pytest.mark.parametrize(
    ("find", "wrong", "message"),
    [
        (catalog.find, "v5e-9", r"did you mean v5e-8 \(also called v5litepod-8, .*podslice:2x4, ct5lp-hightpu"),
        (catalog.find, "ct6e-standard-2t", "did you mean ct6e-standard-[148]t .*v6e-"),
        (catalog.find, "v4:3x3x3", "no v4 with topology 3x3x3; it has 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4"),
        (catalog.find, "NVIDIA H100", r"v5litepod-8 \(TPU API\), .*podslice:2x4 \(GKE\) or v5e:2x4 \(compiler\)"),
        (catalog.find, "", "`tpuswarm catalog` lists them all"),
        (
            catalog.find_hardware,
            "rtx3090",
            "'rtx3090': did you mean rtx-3090\\? GPUs: h100-sxm, h100-pcie, ",
        ),
        (catalog.find_hardware, "abacus", "`tpuswarm catalog` lists the TPUs. GPUs: h100-sxm, .*, rtx-5090"),
        (catalog.find_hardware, "gtx-1650", "unknown TPU or GPU"),  # Turing
        (catalog.find_hardware, "v5e-9", r"unknown TPU 'v5e-9': did you mean v5e-8 \(also called v5litepod-8"),
        (catalog.find_hardware, "v4:3x3x3", "no v4 with topology 3x3x3; it has 2x2x1"),
    ],
)
def test_unknown_name_is_answered_with_the_nearest_known_one(find, wrong: str, message: str):
    with pytest.raises(InputError, match=message) as caught:
        find(wrong)
    assert "\n" not in str(caught.value)


def test_each_name_finds_one_gpu_or_tpu():
    names = [name for hardware in (*ALL, *catalog.gpus()) for name in hardware.names]
    assert len(names) == len(set(names))
    for hardware in (*ALL, *catalog.gpus()):
        assert all(catalog.find_hardware(f" {name.upper()} ") is hardware for name in hardware.names)
    assert catalog.find_hardware("h100").device_kind == "NVIDIA H100 80GB HBM3"


OPENXLA = {  # xla/backends/gpu/target_config/specs
    "h100-sxm": (132, 128, 233472, 232448, 2048, 52428800, 84942979072, 3352320000000),
    "a100-40gb": (108, 64, 167936, 166912, 2048, 41943040, 42331013120, 1555200000000),
    "a100-80gb": (108, 64, 167936, 166912, 2048, 41943040, 85100068864, 2039040000000),
}
FIELDS = (
    "core_count", "fpus_per_core", "shared_memory_per_core", "shared_memory_per_block_optin", "threads_per_core_limit",
    "l2_cache_size", "device_memory_size", "memory_bandwidth",
)  # fmt: skip


@pytest.mark.parametrize("name", OPENXLA)
def test_gpus_are_described_to_the_compiler_as_xla_describes_them(name: str):
    config = catalog.find_hardware(name).compiler.options["target_config"]
    described = [int(re.search(rf"\b{field}: (\d+)", config)[1]) for field in FIELDS]
    assert described == [pytest.approx(value, rel=0.001) for value in OPENXLA[name]]


def test_every_gpu_has_described_limits_and_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    listed = (
        re.search(r"One card each: (.*?)\.", text, re.DOTALL)[1].replace(" (SXM)", "").replace("\n", " ").split(", ")
    )
    assert sorted(gpu.also[0] if "-sxm" in gpu.name else gpu.name for gpu in catalog.gpus()) == sorted(listed)
    for gpu in catalog.gpus():
        assert find_source(read_data("capabilities")[gpu.compute_capability]["source"]).read


@pytest.mark.parametrize(
    ("kind", "precision", "flops"),
    [
        ("TPU v3", "bf16", 61.5e12),  # 123 TFLOP/s per chip of two devices
        ("TPU v4", "bf16", 275e12),  # the two cores of a chip are one device
        ("TPU v5 lite", "bf16", 197e12),
        ("TPU v3", "f32", None),
        ("NVIDIA H100 80GB HBM3", "f32", 495e12),
        ("NVIDIA H200", "highest", None),
        ("Tesla T4", "bf16", None),  # no units for it
        ("Tesla T4", "f32", 8.1e12),
        ("cpu", "bf16", None),
    ],
)
def test_peak_flops_are_found_by_jaxs_device_kind(kind, precision, flops):
    assert catalog.peak_flops(kind, precision) == flops


def test_device_kinds_are_unique_and_have_a_bandwidth():
    assert catalog.memory_bandwidth("TPU v2") == 350e9 and catalog.memory_bandwidth("NVIDIA H200") == 4.8e12
    kinds = [kind for chip in (*catalog.generations(), *catalog.gpus()) for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize("tpu", ALL, ids=lambda tpu: tpu.name)
def test_zones_and_prices_are_plausible(tpu: catalog.Accelerator):
    zones = tpu.zones()
    assert zones and len(zones) == len(set(zones)) and all(ZONE.fullmatch(zone) for zone in zones)
    offered = [zone for offer in tpu.offers for zone in offer.zones]
    assert len(offered) == len(set(offered)), "a zone offers a type in one way"
    assert {price.region for price in tpu.prices()} <= {region_of(zone) for zone in offered}
    for price in tpu.prices():
        assert price.on_demand and price.on_demand > 0
        assert price.spot is None or 0 < price.spot <= price.on_demand
        assert price.on_demand / tpu.chips < 20, "the price list writes 700.0 where it knows none"


def test_price_depends_on_the_region():
    assert catalog.find("v2-8").price("europe-west4-a") == catalog.find("v2-8").price("europe-west4")
    assert catalog.find("v5e-8").price().on_demand == pytest.approx(8 * 1.20)  # $1.20 per chip-hour in us-central1
    assert catalog.find("tpu7x-8").price() is None and catalog.find("v5e-8").price("us-east7") is None
    assert catalog.find("tpu7x-8").zones() == ("us-central1-c", "us-central1-ai1a")
    assert "asia-east1-c" in catalog.find("v6e-8").zones("sold")
    assert catalog.find("v6e-8").price("asia-east1-c") is None, "a zone of the list without a price"


@pytest.mark.parametrize(
    ("name", "zone", "on_demand", "spot"),
    [("v3-8", "us-central1-f", 8.0, 2.04), ("v5p-12288", "europe-west1-d", 27398.89152, 10959.55661)],
)
def test_type_that_is_not_offered_to_everyone_has_the_listed_price(name, zone, on_demand, spot):
    tpu = catalog.find(name)
    assert zone in {*tpu.zones("sold"), *tpu.zones("single tenant")}
    price = tpu.price(zone)
    assert price and (price.on_demand, price.spot) == pytest.approx((on_demand, spot), rel=1e-4)


NETWORK_FIGURES = ("network_gbps", "interconnect_bandwidth")


def test_every_figure_has_source_and_date():
    chips = (*catalog.generations(), *catalog.gpus())
    figures = [figure for chip in chips for figure in chip.figures.values()]
    hosts = [host for generation in catalog.generations() for host in generation.hosts.values()]
    figures += [figure for host in hosts for figure in host.figures.values()]
    for figure in with_alternatives(figures):
        assert figure.value not in (None, "") and isinstance(figure.date, date)
        assert figure.source.title and figure.source.url.startswith("https://")
    for source in [tpu.source for tpu in ALL] + [price.source for tpu in ALL for price in tpu.prices()]:
        assert isinstance(source.read, date)


def test_host_sizes_and_network_speeds_have_a_source_that_anyone_can_read():
    for generation in catalog.generations():
        figures = [figure for host in generation.hosts.values() for figure in host.figures.values()]
        figures += [generation.figures[key] for key in NETWORK_FIGURES if key in generation.figures]
        assert [figure.value for figure in figures if "notes" in figure.source.title] == [], generation.name


def with_alternatives(figures: list[Figure]) -> Iterator[Figure]:
    for figure in figures:
        yield figure
        yield from with_alternatives(list(figure.other))


def test_published_spot_runs_have_a_source():
    found = catalog.spot_records()
    assert len(found) == 7 and sum(run.lost for run in found) == 42
    for run in found:
        assert catalog.find(run.type).name == run.type and run.source.url.startswith("https://")
        assert run.ran < run.hours and run.hours_between > 1 > run.hours_away


def test_vm_prices_match_the_list():
    by_name = {vm.name: vm for vm in catalog.machines()}
    assert len(by_name) == len(catalog.machines())
    for name, place, on_demand, spot in (  # sizes that the rates were not derived from
        ("n2-highmem-80", "us-central1", 5.24056, 1.71296),
        ("n2-highmem-80", "europe-west4-a", 5.76912, 2.0096),
        ("n1-standard-96", "us-central1-f", 4.55998, 1.25352),
        ("n1-highmem-96", "europe-west4-a", 6.25133, 2.5007),
        ("c3d-standard-360", "us-central1-f", 16.34364, 2.47032),
    ):
        price = by_name[name].price(place)
        assert (price.on_demand, price.spot) == pytest.approx((on_demand, spot), rel=1e-3), name
    assert by_name["e2-standard-4"].price("us-central1").on_demand == pytest.approx(0.13402, rel=1e-3)
    assert (by_name["e2-highmem-16"].memory_gib, by_name["e2-highmem-16"].network_gbps) == (128, 16)
    assert by_name["e2-highmem-16"].price("us-central2-b") is None
    for vm in catalog.machines():
        assert all(0 < price.spot <= price.on_demand for price in vm.prices)
        assert all(figure.source.read for figure in vm.figures.values())


@pytest.mark.parametrize(("days", "old"), [(90, False), (91, True)])
def test_prices_are_called_old_after_three_months(days, old):
    read = max(price.source.read for tpu in ALL for price in tpu.prices())
    warning = describe_old_prices(read + timedelta(days=days))
    assert warning is None if not old else f"{days} days ago. Compare https://" in warning


def documented(*headings: str) -> dict[str, list[str]]:
    """Return the rows of a table of docs/choosing-a-tpu.md by their first cell."""
    text = (Path(__file__).parents[2] / "docs" / "choosing-a-tpu.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    start = next(number for number, row in enumerate(rows) if row[1 : 1 + len(headings)] == list(headings))
    found: dict[str, list[str]] = {}
    for row in rows[start + 1 :]:
        if len(row) != len(rows[start]) or row[0] in found or not row[0]:
            break
        found[row[0]] = row[1:]
    return found


def test_documented_generations_and_names_match_the_catalogue():
    rows = documented("peak bf16 per chip", "HBM per chip")
    assert {name.lower(): row[:3] for name, row in rows.items()} == {
        generation.name: [
            f"{generation.peak_bf16 / 1e12:,.0f} TFLOP/s",
            f"{generation.hbm_bytes / 2**30:.0f} GiB",
            f"{generation.compiler_hbm_bytes / 2**30:.2f} GiB",
        ]
        for generation in catalog.generations()
    }
    for name, (api, gke, compiler) in documented("TPU API", "GKE: accelerator, topology, machine").items():
        tpu = catalog.find(name)
        assert (api, compiler) == (tpu.api_name or "–", tpu.compiler.name)
        assert gke.split(", ") == list(tpu.gke[:3])


def test_documented_prices_match_the_catalogue():
    rows = documented("$ per chip-hour on demand", "spot")
    for row in ("v2-8", "v3-8", "v4", "v5e", "v5p", "v6e"):
        tpu = catalog.find(row if "-" in row else f"{row}-8")
        prices, peak = (tpu.price().on_demand, tpu.price().spot), tpu.chips * tpu.generation.peak_bf16 / 1e12
        expected = [f"{price / tpu.chips:.3f}" for price in prices] + [f"{peak / price:,.0f}" for price in prices]
        assert rows[row] == expected


@pytest.mark.parametrize(
    ("relation", "place", "dollars"),
    [
        ("same region", "us-central1-a", 0.01),
        ("same continent", "me-west1-a", None),
        ("other continent", "australia-southeast1", 0.15),
        ("internet", "asia-northeast1-b", 0.12),
    ],
)
def test_traffic_is_priced_by_distance(relation: network.Relation, place: str, dollars: float | None):
    price = network.transfer_price(relation, place)
    assert (price and price.value) == dollars and (price is None or price.date)
    with pytest.raises(InputError, match="'mars-1' is not a Google Cloud region or zone"):
        network.transfer_price(relation, "mars-1")


def test_reading_a_bucket_and_storage_have_prices():
    assert network.read_price("same zone").value == 0 and network.read_price("same continent").value == 0.02
    assert network.read_price("other continent") is None and network.read_price("internet").value == 0.12
    assert network.storage_prices()["gib_month"].value == 0.02 and network.disk_prices()["balanced_gib_month"].date
