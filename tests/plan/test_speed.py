"""Speed and cost of a slice, and suggestions for a model that does not fit."""

import pytest
from benchmarks.calibration import run
from benchmarks.report import Settings

from tpuswarm import catalog
from tpuswarm.catalog import Price
from tpuswarm.config.units import GIB
from tpuswarm.plan.compile.request import CompileResult
from tpuswarm.plan.format import format_hours
from tpuswarm.plan.row import explain_no_fit
from tpuswarm.plan.speed import Range, estimate_cost, estimate_speed, expected_band
from tpuswarm.train.program import compiled

V5E = catalog.find("v5e-8").generation
PRICE = Price("us-central1", 10.0, None, V5E.figures["peak_bf16"].source)


def test_floor_is_the_slower_of_compute_and_memory():
    compute = estimate_speed(V5E, 8, flops=8 * 197e12, least_flops=8 * 197e12 / 2, moved_bytes=2 * 0.819e9, tokens=1000)
    assert (compute.floor_seconds, compute.bound, compute.floor_tokens_per_s) == (0.5, "compute", 2000)
    memory = estimate_speed(V5E, 8, flops=8 * 197e10, least_flops=8 * 197e10, moved_bytes=2 * 8.19e9, tokens=1000)
    assert memory.bound == "memory" and memory.floor_seconds == pytest.approx(2 * 8.19 / 819, rel=0.03)


def test_expected_time_lies_above_the_floor():
    found = estimate_speed(V5E, 8, flops=8 * 197e12, least_flops=8 * 197e12, moved_bytes=0, tokens=1000)
    guess = expected_band("v5e")
    assert found.seconds == Range(1 / guess.high, 1 / guess.low) and found.source == guess.source
    assert found.tokens_per_s.low == pytest.approx(1000 * guess.low)
    bound = estimate_speed(V5E, 8, flops=8 * 197e10, least_flops=8 * 197e10, moved_bytes=V5E.bandwidth, tokens=1000)
    assert bound.bound == "memory" and bound.floor_seconds == 1
    assert bound.seconds == Range(1 / guess.high, 1 / guess.low)  # no program reaches the whole bandwidth either


def test_source_names_bf16_for_other_precisions():
    bf16, highest = (estimate_speed(V5E, 8, 1e15, 1e15, 0, 1000, precision=name).source for name in ("bf16", "highest"))
    assert bf16 == expected_band("v5e").source and "in bf16, and highest is slower" in highest


def test_generation_has_its_own_band_if_enough_systems_are_published():
    """The three figures for v3 are Levanter's, all on v3-256: others' are far outside."""
    assert (expected_band("v6e").low, expected_band("v6e").high) == (0.23, 0.465)
    assert "3 published figures for v6e: tpuchat" in expected_band("v6e").source
    assert "8 published figures for any TPU" in expected_band("v2").source
    assert expected_band("v3").low == expected_band("v2").low and "any TPU" in expected_band("v3").source


def test_hours_and_dollars_and_unknown_prices():
    found = estimate_cost(Range(1e6, 2e6), 7.2e9, PRICE, members=3)
    assert found.hours == Range(1, 2) and found.on_demand == Range(30, 60)
    assert found.spot is None  # no source has a price, so there is no guess
    assert estimate_cost(Range(1e6, 2e6), 7.2e9, PRICE, free=True).on_demand == Range(0, 0)
    assert estimate_cost(Range(1e6, 2e6), 7.2e9, None).on_demand is None


def test_share_of_the_peak_is_counted_as_maxtext_counts_it(tmp_path):
    rows = {row[1]: row for row in run(Settings(False, tmp_path)).rows}
    for model in ("Llama 8B", "Llama 70B"):
        published, ours = (float(share.strip("%")) for share in rows[model][7].split(", "))
        assert abs(published - ours) <= 0.15


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(2.2e-05, 3e-05, "0.079 to 0.11 s"), (0.1, 0.5, "6 to 30 min"), (0.5, 2, "0.5 to 2 h"), (20, 310, "20 to 310 h")],
)
def test_time_is_shown_in_a_readable_unit(low, high, words):
    assert format_hours(Range(low, high)) == words


@pytest.mark.parametrize(
    ("tpu", "gib", "state_gib", "rows", "words"),
    [
        ("v5e-8", 21, 1, 1, "needs 21.00 GiB per device, 5.25 more than the 15.75 available"),
        ("v5e-8", 21, 1, 2, "more chips, at least v5e-16 (estimate; check with --on v5e-16)"),
        ("v5e-8", 21, 1, 1, "chips with more memory (v4, v5p, v6e, tpu7x; estimate): no v5e slice has enough"),
        ("v5e-8", 21, 20, 1, "more chips, at least v5e-16"),
        ("v5e-1", 17, 16, 1, "more chips, at least v5e-4"),
        ("v5e-8", 100, 60, 1, "chips with more memory (v5p, tpu7x; estimate)"),
        ("v5p-12288", 2000, 1, 1, "a smaller model or shorter rows: no TPU slice has enough (estimate)"),
        ("v5e-8", 21, 1, 4, "fewer than 4 rows per device at a time (a larger --accumulate or a smaller --batch)"),
    ],
)
def test_more_chips_split_the_state_and_the_rows_but_no_row(tpu, gib, state_gib, rows, words):
    needs = CompileResult(
        False, needed=gib * GIB, smallest_state=state_gib * GIB, smallest="sharded", is_sharded=True, rows=rows
    )
    assert words in explain_no_fit(catalog.find(tpu), needs)


def test_replicated_state_that_is_too_large_can_be_split():
    needs = CompileResult(False, needed=18 * GIB, smallest_state=17 * GIB, smallest="replicated")
    expected = "splitting the state over the devices (drop --shard); chips with more memory"
    assert expected in explain_no_fit(catalog.find("v3-8"), needs)


@pytest.mark.parametrize(
    ("gib", "words"),
    [
        (
            25,
            "a GPU with more memory (h100-sxm, h100-pcie, h200, a100-40gb, a100-80gb, a100-pcie, l40s; estimate)",
        ),
        (100, "a GPU with more memory (h200; estimate)"),
        (200, "a smaller model or shorter rows: no GPU has enough (estimate)"),
    ],
)
def test_larger_gpus_are_named(gib, words):
    needs = CompileResult(False, needed=gib * GIB, smallest_state=GIB, smallest="one device")
    sentence = explain_no_fit(catalog.find_hardware("rtx-3090"), needs)
    assert words in sentence and f"needs {gib}.00 GiB per device, {gib - 17.77:.2f} more than the 17.77" in sentence


def test_needed_memory_is_read_in_tebibytes():
    refusal = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (8.00T) "
    assert compiled.parse_needed_bytes(refusal + "exceeds available HBM (15.75G).") == 8 * 2**40
