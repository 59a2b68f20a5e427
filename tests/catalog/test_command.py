"""`tpuswarm catalog` as a user runs it."""

import json

import pytest

from tests.local_cloud import local_cloud
from tpuswarm import catalog
from tpuswarm.cli.plan import catalog_check
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.rehearsal.connect import connect, send_command


@pytest.fixture
def run(typed):
    """Run `tpuswarm catalog` and return its output."""

    def run_catalog(line: str = "") -> str:
        code, out, err = typed("catalog", *line.split())
        assert (code, err) == (0, "")
        return out

    return run_catalog


def test_list_has_every_generation_and_its_usual_types(run):
    rows = {words[0]: words for line in run().splitlines() if (words := line.split())}
    types = catalog.accelerators()
    usual = {tpu.name for tpu in types if tpu.chips <= 64}
    assert {generation.name for generation in catalog.generations()} | usual <= set(rows)
    larger = {tpu.name for tpu in types} - usual
    assert not larger & set(rows) and f"{len(larger)} larger types: `tpuswarm catalog GENERATION`" in run()
    assert {tpu.name for tpu in types} <= set(run("--max-chips 100000").split())
    assert rows["v5e-8"][1:] == ["2x4", "8", "8", "1", "128", "1,576", "9.60", "1.96", "us-central1"]
    assert rows["tpu7x-8"][-2:] == ["unknown", "unknown"]
    assert rows["v4"][-1] == "us-central2-b" and "tpu-ubuntu2204-base" in rows["v4"]


def test_single_type_is_described_with_sources(run):
    out = run("v5litepod-8")
    for words in (
        "v5e:2x4", "ct5lp-hightpu-8t", "15.75 GiB per JAX device", "chips_per_host_bounds=(2, 4, 1)",
        "[1] Cloud TPU documentation, TPU v5e: https://", "libtpu 0.0.42.1", "$/h in us-central1",
        "9.60 on demand, 1.96 spot",
    ):  # fmt: skip
        assert words in out
    tpu = json.loads(run("v5litepod-8 --json"))
    assert (tpu["name"], tpu["chips"], tpu["hosts"]) == ("v5e-8", 8, 1)
    peak = tpu["generation"]["figures"]["peak_bf16"]
    assert peak["value"] == 197e12 and peak["date"] and peak["url"].startswith("https://")
    assert all(price["date"] and price["source"] for price in tpu["prices"])


def test_list_is_filtered_by_generation_zone_and_chips(run):
    listed = json.loads(run("v5e --zone us-west4 --max-chips 8 --json"))
    assert [tpu["name"] for tpu in listed["types"]] == ["v5e-1", "v5e-4", "v5e-8"]
    assert [generation["name"] for generation in listed["generations"]] == ["v5e"]
    assert {price["region"] for tpu in listed["types"] for price in tpu["prices"]} == {"us-west4"}
    in_one_zone = json.loads(run("--zone us-central2-b --json"))
    assert {tpu["generation"] for tpu in in_one_zone["types"]} == {"v4"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("v5e-9", "did you mean v5e-8"),
        ("--zone us-west9", "no TPU in the catalogue is offered in 'us-west9': did you mean us-west4?"),
        ("v4 --zone us-central1", "v4 is not offered in 'us-central1'. Open zones: `tpuswarm catalog v4`"),
        ("v4 --zone us-central3", "v4 is not offered in 'us-central3': did you mean us-central2?"),
        ("v5e --zone us-east5-a", "v5e is not offered to everyone in 'us-east5-a' (single tenant only: v5e). "),
        ("--zone us-east5-c", "is offered to everyone in 'us-east5-c' (single tenant only: v5e, v5p, v6e). Open"),
        ("--zone us-east4-b", "in 'us-east4-b' (single tenant only: v6e; only on a price list: v5e). "),
        ("v4 --max-chips 2", "the smallest is v4-8 with 4"),
        ("v3-8 --zone us-central1", "v3-8 is one type: leave them out"),
        ("--max-chips 0", "--max-chips"),
    ],
)
def test_wrong_input_is_one_sentence(typed, line: str, message: str):
    code, out, err = typed("catalog", *line.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err


def test_check_names_zones_that_differ_and_no_others(tmp_path, monkeypatch):
    """A local cloud offers what the catalogue says, but for planted differences."""
    with local_cloud(tmp_path) as place:
        access = Access("my-project", connect(place.path))
        assert catalog_check.compare_with_project(access) == []
        send_command(place, "break", name="us-central2-b", fault="hidden")
        zones, of_v3 = catalog.Accelerator.zones, catalog.find("v3-8")

        def wrong_zones(tpu, access="open"):
            if tpu is of_v3:
                return ()
            return (*zones(tpu, access), *("us-west1-c",) * (tpu.name == "v2-8"))

        monkeypatch.setattr(catalog.Accelerator, "zones", wrong_zones)
        found = catalog_check.compare_with_project(access)
    assert found[:1] == ["europe-west4-a, TPU API: offers v3-8, which the catalogue lacks there"]
    assert "us-central2-b, TPU API: this project does not see the zone, which the catalogue calls open" in found
    assert "us-west1-c, TPU API: offers no v2-8, which the catalogue calls open there" in found
    assert all("v3-8" in line or "us-central2-b" in line or "us-west1-c" in line for line in found)
