"""`tpuswarm catalog`, as a user runs it."""

import json
import subprocess
import sys

import pytest

from tpuswarm import catalog


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tpuswarm", "catalog", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_lists_all_and_starts_without_jax():
    done = run()
    assert done.returncode == 0 and "| jax" not in done.stderr and "numpy" not in done.stderr
    rows = {words[0]: words for line in done.stdout.splitlines() if (words := line.split())}
    assert {each.name for each in (*catalog.generations(), *catalog.accelerators())} <= set(rows)
    assert rows["v5e-8"][1:] == ["2x4", "8", "8", "1", "128", "1,576", "9.60", "1.96", "us-central1"]
    assert rows["tpu7x-8"][-2:] == ["unknown", "unknown"]
    assert rows["v4"][-1] == "us-central2-b" and "tpu-ubuntu2204-base" in rows["v4"]


def test_all_about_one_type_with_sources():
    done = run("v5litepod-8")
    for said in ("v5e:2x4", "ct5lp-hightpu-8t", "15.75 GiB per JAX device", "chips_per_host_bounds=(2, 4, 1)"):
        assert said in done.stdout
    assert "[1] Cloud TPU documentation, TPU v5e: https://" in done.stdout and "libtpu 0.0.42.1" in done.stdout
    assert "$/h in us-central1" in done.stdout and "9.60 on demand, 1.96 spot" in done.stdout
    one = json.loads(run("v5litepod-8", "--json").stdout)
    assert (one["name"], one["chips"], one["hosts"]) == ("v5e-8", 8, 1)
    peak = one["generation"]["figures"]["peak_bf16"]
    assert peak["value"] == 197e12 and peak["date"] and peak["url"].startswith("https://")
    assert all(price["date"] and price["source"] for price in one["prices"])


def test_filters():
    listed = json.loads(run("v5e", "--zone", "us-west4", "--max-chips", "8", "--json").stdout)
    assert [each["name"] for each in listed["types"]] == ["v5e-1", "v5e-4", "v5e-8"]
    assert [each["name"] for each in listed["generations"]] == ["v5e"]
    assert {price["region"] for each in listed["types"] for price in each["prices"]} == {"us-west4"}
    in_one_zone = json.loads(run("--zone", "us-central2-b", "--json").stdout)
    assert {each["generation"] for each in in_one_zone["types"]} == {"v4"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("v5e-9",), "did you mean v5e-8"),
        (("v4:3x3x3",), "it has 2x2x1, 2x2x2"),
        (("--zone", "us-west9"), "no TPU in the catalogue is offered in 'us-west9': did you mean us-west4?"),
        (("v4", "--zone", "us-central1"), "v4 is not offered in 'us-central1': `tpuswarm catalog v4` lists open zones"),
        (("v4", "--zone", "us-central3"), "v4 is not offered in 'us-central3': did you mean us-central2?"),
        (
            ("--zone", "us-east5-c"),
            "no TPU in the catalogue is offered to everyone in 'us-east5-c' (single tenant only: v5e, v5p, v6e): `tpus",
        ),
        (("v5e", "--zone", "us-east5-a"), "v5e is not offered to everyone in 'us-east5-a' (single tenant only: v5e): "),
        (("--zone", "us-east4-b"), "in 'us-east4-b' (single tenant only: v6e; only on a price list: v5e): "),
        (("v4", "--max-chips", "2"), "the smallest is v4-8 with 4"),
        (("v3-8", "--zone", "us-central1"), "v3-8 is a single type: leave them out"),
        (("--max-chips", "0"), "--max-chips"),
    ],
)
def test_wrong_input_is_one_sentence(words: tuple[str, ...], said: str):
    done = run(*words)
    error = [line for line in done.stderr.splitlines() if not line.startswith("import time")]
    assert done.returncode == 2 and done.stdout == ""
    assert len(error) == 1 and said in error[0]
